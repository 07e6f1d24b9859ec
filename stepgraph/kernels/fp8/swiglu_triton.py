"""The Triton kernels of `swiglu`."""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.fp8 import cast_triton
from stepgraph.kernels.fp8.cast_triton import _SMALLEST, _bits, _rounded, _scale, _top
from stepgraph.kernels.fp8.formats import MOST


@triton.jit
def _swiglu_kernel(gate, up, y, q, scale, C, gate_stride, up_stride, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Row ``program_id(0)`` of the product and of its cast. ``y``: None where nothing reads the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < C
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    silu = tl.div_rn(g, 1.0 + tl.exp(-g)).to(u.dtype)
    value = (silu.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
    if y is not None:
        tl.store(y + row * C + column, value, mask=inside)
    _store_cast(value, q, scale, row, column, C, _SMALLEST, MOST)


@triton.jit
def _swiglu_backward_kernel(
    dy, gate, up, dgate, dup, q_gate, q_up, scale_gate, scale_up, C, dy_stride, gate_stride, up_stride,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row ``program_id(0)`` of both gradients and of their casts. ``dgate``, ``dup``: None where nothing reads them.

    The second gradient loads its inputs again, out of the cache: a thread has no registers for both in long rows.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < C
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0)
    x = g.to(tl.float32)
    silu = tl.div_rn(x, 1.0 + tl.exp(-x)).to(g.dtype)
    value = (d.to(tl.float32) * silu.to(tl.float32)).to(g.dtype)
    if dup is not None:
        tl.store(dup + row * C + column, value, mask=inside)
    _store_cast(value, q_up, scale_up, row, column, C, _SMALLEST, MOST)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    dsilu = (d.to(tl.float32) * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    x = g.to(tl.float32)
    sigmoid = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
    value = (dsilu * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(g.dtype)
    if dgate is not None:
        tl.store(dgate + row * C + column, value, mask=inside)
    _store_cast(value, q_gate, scale_gate, row, column, C, _SMALLEST, MOST)


@triton.jit
def _store_cast(value, q, scale, row, column, C, SMALLEST: tl.constexpr, MOST: tl.constexpr):
    """The cast of a whole row, and its scale."""
    top = _top(tl.max(_bits(value), 1), SMALLEST)
    tl.store(q + row * C + column, _rounded(value, top[:, None], MOST, q.dtype.element_ty), mask=column < C)
    tl.store(scale + row + tl.zeros([1], tl.int32), _scale(top, MOST))


def launch(
    gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `swiglu.swiglu_cast_rows`. A row that no program holds takes the kernels of each operator by itself."""
    columns = gate.shape[-1]
    if columns > cast_triton.LONGEST:
        y = (torch.nn.functional.silu(gate) * up).contiguous()
        q, scale, _, _ = cast_triton.launch_rows(y.view(-1, columns), dtype, True, False)
        return y if keep else y.new_empty(0), q, scale
    rows = gate.numel() // columns
    y = gate.new_empty(gate.shape if keep else (0,))
    q, scale = gate.new_empty(rows, columns, dtype=dtype), gate.new_empty(rows, dtype=torch.float32)
    gate, up = (_rows(t) for t in (gate, up))
    block, warps = cast_triton.row_configuration(columns)
    with cast_triton._on(gate):
        _swiglu_kernel[(rows,)](
            gate, up, y if keep else None, q, scale, columns, gate.stride(0), up.stride(0),
            MOST=MOST[dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y, q, scale


def launch_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, results: tuple[torch.Tensor, ...], keep: bool
) -> None:
    """As `swiglu.swiglu_backward_cast_rows`, into ``results``. Rows of up to `cast_triton.LONGEST`."""
    dgate, dup, q_gate, scale_gate, q_up, scale_up = results
    columns = gate.shape[-1]
    dy, gate, up = (_rows(t) for t in (dy, gate, up))
    block, warps = backward_configuration(columns, gate.element_size())
    with cast_triton._on(gate):
        _swiglu_backward_kernel[(len(q_gate),)](
            dy, gate, up, *((dgate, dup) if keep else (None, None)), q_gate, q_up, scale_gate, scale_up,
            columns, dy.stride(0), gate.stride(0), up.stride(0), MOST=MOST[q_up.dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip


def backward_configuration(C: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK, warps): 16 elements a thread; in the longest rows 32 of bf16, 64 of fp32, which fit the registers."""
    block, _ = cast_triton.row_configuration(C)
    return block, min(max(block // 512, 1), 32 // itemsize)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix whose rows are dense."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()

"""The Triton kernel of `swiglu`."""

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
    top = _top(tl.max(_bits(value), 1), _SMALLEST)
    tl.store(q + row * C + column, _rounded(value, top[:, None], MOST, q.dtype.element_ty), mask=inside)
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


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix whose rows are dense."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()

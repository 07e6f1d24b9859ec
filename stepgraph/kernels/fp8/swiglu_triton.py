"""The Triton kernels of `swiglu`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.fp8 import cast_triton
from stepgraph.kernels.fp8.cast_triton import _SMALLEST, _bits, _rounded, _scale, _top
from stepgraph.kernels.fp8.formats import MOST
from stepgraph.kernels.fp8.swiglu import backward_reference, empty_results

#: Where columns are compared: bytes of a column of a tile, columns of a tile, tiles that are on their way, warps, and
#: rows of a program.
TALL_BYTES, WIDE, STAGES, TILE_WARPS, CHUNK = 8, 256, 1, 4, 128


@triton.jit
def _swiglu_kernel(gate, up, y, q, scale, C, gate_stride, up_stride, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Row ``program_id(0)`` of the product and of its cast. ``y``: None where nothing reads the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < C
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    value = _product(g, u)
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
    value = _product(g, d)
    if dup is not None:
        tl.store(dup + row * C + column, value, mask=inside)
    _store_cast(value, q_up, scale_up, row, column, C, _SMALLEST, MOST)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0)
    value = _gate_gradient(d, g, u)
    if dgate is not None:
        tl.store(dgate + row * C + column, value, mask=inside)
    _store_cast(value, q_gate, scale_gate, row, column, C, _SMALLEST, MOST)


@triton.jit
def _product(g, u):
    """``silu(g) * u``, rounded twice."""
    x = g.to(tl.float32)
    silu = tl.div_rn(x, 1.0 + tl.exp(-x)).to(u.dtype)
    return (silu.to(tl.float32) * u.to(tl.float32)).to(u.dtype)


@triton.jit
def _gate_gradient(d, g, u):
    """The gradient of ``g`` in `_product`, rounded twice."""
    dsilu = (d.to(tl.float32) * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    x = g.to(tl.float32)
    sigmoid = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))
    return (dsilu * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(g.dtype)


@triton.jit
def _magnitudes_kernel(
    gate, up, y, row_bits, column_bits, R, C, gate_stride, up_stride, CHUNK,
    COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of ``CHUNK`` rows of the product, one tile after another, and their largest magnitudes into those of
    the matrix, which begin as zeros."""
    across = tl.cdiv(C, WIDE)
    column = ((tl.program_id(0) % across) * WIDE + tl.arange(0, WIDE))[None, :]
    begin = (tl.program_id(0) // across) * CHUNK
    most = tl.zeros([TALL, WIDE], tl.int32)
    for first in tl.range(begin, tl.minimum(begin + CHUNK, R), TALL, num_stages=STAGES):
        row = first + tl.arange(0, TALL)
        at = row.to(tl.int64)[:, None]
        inside = (row < R)[:, None] & (column < C)
        g = tl.load(gate + at * gate_stride + column, mask=inside, other=0.0)
        u = tl.load(up + at * up_stride + column, mask=inside, other=0.0)
        value = _product(g, u)
        tl.store(y + at * C + column, value, mask=inside)
        most = _compare(value, most, row_bits, row, R)
    if COLUMNS:
        _keep_columns(most, column_bits, column, C)


@triton.jit
def _backward_magnitudes_kernel(
    dy, gate, up, dgate, dup, gate_rows, gate_columns, up_rows, up_columns, R, C, dy_stride, gate_stride, up_stride,
    CHUNK, COLUMNS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_magnitudes_kernel` for both gradients of the product."""
    across = tl.cdiv(C, WIDE)
    column = ((tl.program_id(0) % across) * WIDE + tl.arange(0, WIDE))[None, :]
    begin = (tl.program_id(0) // across) * CHUNK
    gate_most = tl.zeros([TALL, WIDE], tl.int32)
    up_most = tl.zeros([TALL, WIDE], tl.int32)
    for first in tl.range(begin, tl.minimum(begin + CHUNK, R), TALL, num_stages=STAGES):
        row = first + tl.arange(0, TALL)
        at = row.to(tl.int64)[:, None]
        inside = (row < R)[:, None] & (column < C)
        d = tl.load(dy + at * dy_stride + column, mask=inside, other=0.0)
        g = tl.load(gate + at * gate_stride + column, mask=inside, other=0.0)
        u = tl.load(up + at * up_stride + column, mask=inside, other=0.0)
        value = _product(g, d)
        tl.store(dup + at * C + column, value, mask=inside)
        up_most = _compare(value, up_most, up_rows, row, R)
        value = _gate_gradient(d, g, u)
        tl.store(dgate + at * C + column, value, mask=inside)
        gate_most = _compare(value, gate_most, gate_rows, row, R)
    if COLUMNS:
        _keep_columns(gate_most, gate_columns, column, C)
        _keep_columns(up_most, up_columns, column, C)


@triton.jit
def _compare(value, most, row_bits, row, R):
    """The largest magnitudes so far, of each place of a tile; those of its rows into the matrix's."""
    bits = _bits(value)
    tl.atomic_max(row_bits + row, tl.max(bits, 1), mask=row < R, sem="relaxed")
    return tl.maximum(most, bits)


@triton.jit
def _keep_columns(most, column_bits, column, C):
    tl.atomic_max(column_bits + column, tl.max(most, 0)[None, :], mask=column < C, sem="relaxed")


@triton.jit
def _store_cast(value, q, scale, row, column, C, SMALLEST: tl.constexpr, MOST: tl.constexpr):
    """The cast of a whole row, and its scale."""
    top = _top(tl.max(_bits(value), 1), SMALLEST)
    tl.store(q + row * C + column, _rounded(value, top[:, None], MOST, q.dtype.element_ty), mask=column < C)
    tl.store(scale + row + tl.zeros([1], tl.int32), _scale(top, MOST))


def launch(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `swiglu.swiglu_cast_rows`. A row that no program holds takes the kernels of each operator alone."""
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
    _swiglu_kernel[(rows,)](
        gate, up, y if keep else None, q, scale, columns, gate.stride(0), up.stride(0),
        MOST=MOST[dtype], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, q, scale


def launch_backward(dy: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, ...]:
    """As `swiglu.swiglu_backward_cast_rows`."""
    columns = gate.shape[-1]
    if columns > cast_triton.LONGEST:
        return backward_reference(dy, gate, up, dtype, keep, cast_triton.launch_rows)
    results = dgate, dup, q_gate, scale_gate, q_up, scale_up = empty_results(gate, dtype, keep)
    dy, gate, up = (_rows(t) for t in (dy, gate, up))
    block, warps = backward_configuration(columns, gate.element_size())
    _swiglu_backward_kernel[(len(q_gate),)](
        dy, gate, up, *((dgate, dup) if keep else (None, None)), q_gate, q_up, scale_gate, scale_up,
        columns, dy.stride(0), gate.stride(0), up.stride(0), MOST=MOST[q_up.dtype], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return results


def launch_magnitudes(gate: Tensor, up: Tensor, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `swiglu.swiglu_magnitudes`."""
    y, (gate, up) = gate.new_empty(gate.shape), (_rows(t) for t in (gate, up))
    bits = _zeros(gate, columns)
    _magnitudes_kernel[_programs(gate)](
        gate, up, y, *bits, *gate.shape, gate.stride(0), up.stride(0), CHUNK,
        COLUMNS=columns, TALL=TALL_BYTES // gate.element_size(), WIDE=WIDE, STAGES=STAGES, num_warps=TILE_WARPS,
    )  # fmt: skip
    return y, *(b.view(torch.float32) for b in bits)


def launch_backward_magnitudes(dy: Tensor, gate: Tensor, up: Tensor, columns: bool) -> tuple[Tensor, ...]:
    """As `swiglu.swiglu_backward_magnitudes`."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    dy, gate, up = (_rows(t) for t in (dy, gate, up))
    bits = *_zeros(gate, columns), *_zeros(gate, columns)
    _backward_magnitudes_kernel[_programs(gate)](
        dy, gate, up, dgate, dup, *bits, *gate.shape, dy.stride(0), gate.stride(0), up.stride(0), CHUNK,
        COLUMNS=columns, TALL=TALL_BYTES // gate.element_size(), WIDE=WIDE, STAGES=STAGES, num_warps=TILE_WARPS,
    )  # fmt: skip
    return dgate, dup, *(b.view(torch.float32) for b in bits)


def _programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.shape[0], CHUNK) * triton.cdiv(x.shape[1], WIDE),)


def _zeros(x: Tensor, columns: bool) -> tuple[Tensor, Tensor]:
    """For the magnitudes of rows and of columns."""
    R, C = x.shape
    rows, across = (torch.zeros(n, dtype=torch.int32, device=x.device) for n in (R, C if columns else 0))
    return rows, across


def backward_configuration(C: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK, warps): 16 elements a thread; in the longest rows 32 of bf16, 64 of fp32, which fit the registers."""
    block, _ = cast_triton.row_configuration(C)
    return block, min(max(block // 512, 1), 32 // itemsize)


def _rows(x: Tensor) -> Tensor:
    """``x`` as a matrix whose rows are dense."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()

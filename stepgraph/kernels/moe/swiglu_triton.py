"""The Triton kernels of `swiglu`.

A program takes some columns of some rows, of both halves. One whose rows all lie past the last offset reads nothing
else, and writes zeros or (``ZERO_REST`` false) nothing.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.fp8 import cast_triton
from stepgraph.kernels.fp8.cast_triton import _SMALLEST, _bits, _rounded, _scale, _top
from stepgraph.kernels.fp8.formats import MOST
from stepgraph.kernels.moe.packed import new_packed, unpack
from stepgraph.kernels.moe.rows_triton import tile_of
from stepgraph.kernels.moe.swiglu import with_cast

Tensor = torch.Tensor
WARPS = 4
#: Elements of a tile of one half: 16 a thread.
TILE = 2048
#: Columns of the widest half whose row a program casts.
LONGEST = 8192


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
def _tile(offsets, experts, R, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The first row of this program's tile, the end of the rows in use, and the tile's rows and columns."""
    across = tl.cdiv(F, BLOCK)
    first = (tl.program_id(0) // across) * ROWS
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    return first, tl.minimum(tl.load(offsets + experts - 1), R), first + tl.arange(0, ROWS), column[None, :]


@triton.jit
def _swiglu_rows_kernel(
    gate_up, offsets, out, experts, R, F, ZERO_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of the product."""
    first, end, row, column = _tile(offsets, experts, R, F, ROWS, BLOCK)
    wide = row.to(tl.int64)[:, None]
    to, there = out + wide * F + column, (row < R)[:, None] & (column < F)
    if first >= end:
        if ZERO_REST:
            tl.store(to, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=there)
    else:
        at, inside = gate_up + wide * (2 * F) + column, (row < end)[:, None] & (column < F)
        g = tl.load(at, mask=inside, other=0.0)
        u = tl.load(at + F, mask=inside, other=0.0)
        tl.store(to, _product(g, u), mask=there)


@triton.jit
def _swiglu_rows_backward_kernel(
    dy, gate_up, offsets, dgate_up, experts, R, F, ZERO_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of both gradients."""
    first, end, row, column = _tile(offsets, experts, R, F, ROWS, BLOCK)
    wide = row.to(tl.int64)[:, None]
    at, there = wide * (2 * F) + column, (row < R)[:, None] & (column < F)
    if first >= end:
        if ZERO_REST:
            zero = tl.zeros([ROWS, BLOCK], dgate_up.dtype.element_ty)
            tl.store(dgate_up + at, zero, mask=there)
            tl.store(dgate_up + at + F, zero, mask=there)
    else:
        inside = (row < end)[:, None] & (column < F)
        d = tl.load(dy + wide * F + column, mask=inside, other=0.0)
        g = tl.load(gate_up + at, mask=inside, other=0.0)
        u = tl.load(gate_up + at + F, mask=inside, other=0.0)
        tl.store(dgate_up + at, _gate_gradient(d, g, u), mask=there)
        tl.store(dgate_up + at + F, _product(g, d), mask=there)


@triton.jit
def _swiglu_rows_cast_kernel(
    gate_up, offsets, y, q, scale, experts, F, q_stride, scale_stride, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Row ``program_id(0)`` of the product, cast. ``y``: None where nothing reads the product."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    if row < tl.load(offsets + experts - 1):
        at, inside = gate_up + row * (2 * F) + column, column < F
        value = _product(tl.load(at, mask=inside, other=0.0), tl.load(at + F, mask=inside, other=0.0))
        if y is not None:
            tl.store(y + row * F + column, value, mask=inside)
        top = _top(tl.max(_bits(value), 1), _SMALLEST)
        tl.store(q + row * q_stride + column, _rounded(value, top[:, None], MOST, q.dtype.element_ty), mask=inside)
        tl.store(scale + row * scale_stride + tl.zeros([1], tl.int32), _scale(top, MOST))


@triton.jit
def _swiglu_rows_cast_backward_kernel(
    dy, gate_up, offsets, dgate_up, q, scale, experts, F, q_stride, scale_stride,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row ``program_id(0)`` of both gradients, cast with one scale. ``dgate_up``: None where nothing reads them."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    if row < tl.load(offsets + experts - 1):
        at, inside = row * (2 * F) + column, column < F
        d = tl.load(dy + row * F + column, mask=inside, other=0.0)
        g = tl.load(gate_up + at, mask=inside, other=0.0)
        dgate, dup = _gate_gradient(d, g, tl.load(gate_up + at + F, mask=inside, other=0.0)), _product(g, d)
        if dgate_up is not None:
            tl.store(dgate_up + at, dgate, mask=inside)
            tl.store(dgate_up + at + F, dup, mask=inside)
        top = _top(tl.max(tl.maximum(_bits(dgate), _bits(dup)), 1), _SMALLEST)
        to = q + row * q_stride + column
        tl.store(to, _rounded(dgate, top[:, None], MOST, q.dtype.element_ty), mask=inside)
        tl.store(to + F, _rounded(dup, top[:, None], MOST, q.dtype.element_ty), mask=inside)
        tl.store(scale + row * scale_stride + tl.zeros([1], tl.int32), _scale(top, MOST))


def configuration(F: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    return tile_of(TILE, F)


def launch(gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """As `swiglu.swiglu_rows`."""
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(R, F)
    if out.numel():
        rows, block = configuration(F)
        _swiglu_rows_kernel[_programs(R, F)](
            gate_up.contiguous(), offsets.contiguous(), out, offsets.shape[0], R, F,
            ZERO_REST=zero_rest, ROWS=rows, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def launch_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """As `swiglu.swiglu_rows_backward`."""
    R, F = dy.shape
    out = gate_up.new_empty(R, 2 * F)
    if out.numel():
        rows, block = configuration(F)
        _swiglu_rows_backward_kernel[_programs(R, F)](
            dy.contiguous(), gate_up.contiguous(), offsets.contiguous(), out, offsets.shape[0], R, F,
            ZERO_REST=zero_rest, ROWS=rows, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def launch_cast(gate_up: Tensor, offsets: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """As `swiglu.swiglu_rows_cast`."""
    R, F = gate_up.shape[0], gate_up.shape[1] // 2
    if F > LONGEST:  # no program holds a row
        return with_cast(launch(gate_up, offsets), keep)
    packed, y = new_packed(gate_up, F), gate_up.new_empty((R, F) if keep else 0)
    q, scale = unpack(packed)
    block, warps = cast_configuration(F, gate_up.element_size())
    _swiglu_rows_cast_kernel[(R,)](
        gate_up.contiguous(), offsets.contiguous(), y if keep else None, q, scale, offsets.shape[0], F, q.stride(0),
        scale.stride(0), MOST=MOST[q.dtype], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, packed


def launch_cast_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """As `swiglu.swiglu_rows_cast_backward`."""
    R, F = dy.shape
    if F > LONGEST:
        return with_cast(launch_backward(dy, gate_up, offsets), keep)
    packed, grad = new_packed(gate_up, 2 * F), gate_up.new_empty((R, 2 * F) if keep else 0)
    q, scale = unpack(packed)
    block, warps = cast_configuration(F, gate_up.element_size())
    _swiglu_rows_cast_backward_kernel[(R,)](
        dy.contiguous(), gate_up.contiguous(), offsets.contiguous(), grad if keep else None, q, scale,
        offsets.shape[0], F, q.stride(0), scale.stride(0), MOST=MOST[q.dtype], BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad, packed


def cast_configuration(F: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK, warps): 8 elements a thread; in the longest rows 16 of bf16, 32 of fp32."""
    block, _ = cast_triton.row_configuration(F)
    return block, min(max(block // 256, 1), 32 // itemsize)


def _programs(R: int, F: int) -> tuple[int]:
    rows, block = configuration(F)
    return (triton.cdiv(R, rows) * triton.cdiv(F, block),)

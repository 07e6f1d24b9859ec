"""The Triton kernels of `swiglu`.

A program takes some columns of some rows, of both halves. One whose rows all lie past the last offset reads nothing
else, and writes zeros or (``ZERO_REST`` false) nothing.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.fp8.swiglu_triton import _gate_gradient, _product

Tensor = torch.Tensor
WARPS = 4
#: Elements of a tile of one half: 16 a thread.
TILE = 2048


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


def configuration(F: int) -> tuple[int, int]:
    """(rows, columns) of a tile: of the widths that leave the fewest columns of the last tile empty, the largest."""
    if F <= 128:
        block = triton.next_power_of_2(F)
    else:
        block = min((1024, 512, 256, 128), key=lambda columns: triton.cdiv(F, columns) * columns)
    return TILE // block, block


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


def _programs(R: int, F: int) -> tuple[int]:
    rows, block = configuration(F)
    return (triton.cdiv(R, rows) * triton.cdiv(F, block),)

"""The weight and bias gradients: sums over all rows, in a fixed order, of the programs' partial sums.

Every program writes its partial sum to one slot of ``PLANES * pitch`` float32 (the weight's plane, then the bias's).
A second launch, `add_slots_kernel`, adds them up; where there is one program, it writes the gradient itself. One
cooperative launch, whose programs wait for each other and then add up some columns each, took as long even in calls
that move 1.5 GiB.
"""

import triton
import triton.language as tl

from stepgraph.kernels.norm.triton.wide import begin


@triton.jit
def add_slots(partials, base, count, at, mask, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of ``count`` slots from ``base`` on, at columns ``at`` (WIDTH,)."""
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(0, count, ROWS):
        slot = i + tl.arange(0, ROWS)
        place = partials + (base + slot).to(tl.int64)[:, None] * stride + at[None, :]
        # Written by other programs: from L2, past the L1 cache of this processor.
        total += tl.load(place, mask=(slot < count)[:, None] & mask[None, :], other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def write_gradients(value, first, second, at, mask, size, pitch, PLANES: tl.constexpr):
    """Store sums of columns ``at`` of a slot as gradients: ``first`` is plane 0, ``second`` plane 1."""
    tl.store(first + at, value.to(first.dtype.element_ty), mask=mask & (at < size))
    if PLANES == 2:
        inside = mask & (at >= pitch) & (at < pitch + size)
        tl.store(second + (at - pitch), value.to(second.dtype.element_ty), mask=inside)


@triton.jit
def add_slots_kernel(
    partials, first, second, P, size, pitch,
    DEPENDENT: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The second launch: one program for ``WIDTH`` columns."""
    begin(DEPENDENT)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    stride = pitch * PLANES
    value = add_slots(partials, 0, P, at, at < stride, stride, ROWS, WIDTH)
    write_gradients(value, first, second, at, at < stride, size, pitch, PLANES)

"""The weight and bias gradients: sums over all rows, in a fixed order, of the programs' partial sums.

Every program writes its partial sum to one slot of ``PLANES * pitch`` float32 (the weight's plane, then the bias's).
``FINISH`` says how the slots are added up:

    direct   there is one program: it writes the gradient itself
    grid     all programs wait for the last one, then each adds up some columns. One cooperative launch.
    launch   a second launch, `add_slots_kernel`, adds up columns.

The order of the additions is fixed. Counters are zero before and after.
"""

import triton
import triton.language as tl


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
def grid(
    partials, counters, first, second, program, programs, P, size, pitch,
    PLANES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Wait for all programs, then add the ``P`` slots of some columns."""
    tl.debug_barrier()
    tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counters, 0, sem="acquire", scope="gpu") < programs:
        pass
    if tl.atomic_add(counters + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(counters + 1, 0, sem="relaxed", scope="gpu")
    stride = pitch * PLANES
    for c in range(program * WIDTH, stride, programs * WIDTH):
        at = c + tl.arange(0, WIDTH)
        value = add_slots(partials, 0, P, at, at < stride, stride, ROWS, WIDTH)
        write_gradients(value, first, second, at, at < stride, size, pitch, PLANES)


@triton.jit
def add_slots_kernel(
    partials, first, second, P, size, pitch,
    PLANES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The second launch of ``FINISH == "launch"``: one program for ``WIDTH`` columns."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    stride = pitch * PLANES
    value = add_slots(partials, 0, P, at, at < stride, stride, ROWS, WIDTH)
    write_gradients(value, first, second, at, at < stride, size, pitch, PLANES)

"""The weight and bias gradients: sums over all rows, in a fixed order, of the programs' partial sums.

Every program writes its partial sum to one slot of ``PLANES * pitch`` float32 (the weight's plane, then the bias's).
``FINISH`` says how the slots are added up:

    direct   there is one program: it writes the gradient itself
    tree     groups of `FANIN` programs; the last of a group to arrive adds the group's slots in the order of their
             index, writes the sum as a slot of the next level, and is a member there. One launch, no waiting.
    grid     all programs wait for the last one, then each adds up some columns. One cooperative launch; better than
             the tree for long slots, many of which one program would add alone.
    launch   a second launch, `add_slots_kernel`, adds up columns.

Which program arrives last varies; the order of the additions does not. Counters are zero before and after.
"""

import triton
import triton.language as tl

#: Programs of a group of the tree.
FANIN = tl.constexpr(16)


@triton.jit
def counters_of(P):
    """Counters that a tree over ``P`` programs needs, at most: one for each group on each level."""
    return P // 15 + 8


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
def tree(
    partials, counters, first, second, p, P, head_block, part, size, pitch,
    N: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, SLICE: tl.constexpr, PLANES: tl.constexpr,
    WIDTH: tl.constexpr, FANIN: tl.constexpr,
):  # fmt: skip
    """Add the slots of ``P`` programs (this one is ``p``) over the columns and heads of this program."""
    stride = pitch * PLANES
    base = 0
    group_counter = counters
    index = p
    count = P
    alive = True
    while alive:
        groups = tl.cdiv(count, FANIN)
        group = index // FANIN
        members = tl.minimum(FANIN, count - group * FANIN)
        tl.debug_barrier()
        alive = tl.atomic_add(group_counter + group, 1, sem="acq_rel", scope="gpu") == members - 1
        if alive:
            tl.atomic_xchg(group_counter + group, 0, sem="relaxed", scope="gpu")
            for plane in range(PLANES):
                for i in range(BH):
                    head = head_block * BH + i
                    for c in range(0, SLICE, WIDTH):
                        col = part * SLICE + c + tl.arange(0, WIDTH)
                        at = plane * pitch + head * N + col
                        mask = (col < N) & (c + tl.arange(0, WIDTH) < SLICE) & (head < H)
                        value = add_slots(partials, base + group * FANIN, members, at, mask, stride, FANIN, WIDTH)
                        if groups == 1:
                            write_gradients(value, first, second, at, mask, size, pitch, PLANES)
                        else:
                            tl.store(partials + (base + count + group).to(tl.int64) * stride + at, value, mask=mask)
            alive = groups > 1
            base += count
            group_counter += groups
            index = group
            count = groups


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

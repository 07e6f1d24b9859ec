"""The Triton kernels of `expert_rows`.

``addresses`` (2, P) int64: where the memory of each rank begins, and where its flags do; both are within reach of all.
A flag is an int32 per channel and sending rank: 1 from when it is set until it is waited for.

What waits is one small program for each rank: where other kernels have all processors it starts when one of them ends,
and none of them waits for it.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.moe.rows_triton import tile_of

Tensor = torch.Tensor
WARPS = 8
#: How to send: bytes of a tile, warps of a program, and programs. WIDE takes the least time; products that run at the
#: same time wait for its processors. NARROW takes twice as long, on processors that torch's fp8 products of groups
#: leave idle: their clusters of four do not fill every part of an H200. On two H200s 356 us of sending and 490 us of
#: products take 513 us together.
WIDE, NARROW = (32768, 8, 132), (65536, 32, 8)
#: Bytes of a tile that is taken.
TAKEN = 8192
#: Rows that a program places, and how many segments it compares with them at once.
ROWS, AHEAD = 256, 32


@triton.jit(do_not_specialize=["ranks", "first"])
def _tell_kernel(addresses, ranks, first):
    """Set a flag of one rank."""
    flags = tl.load(addresses + ranks + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + first, 1, sem="release", scope="sys")  # after all that earlier kernels wrote


@triton.jit(do_not_specialize=["ranks", "rank", "first"])
def _wait_kernel(addresses, ranks, rank, first):
    """Wait for a flag of this rank, and take it back."""
    flags = tl.load(addresses + ranks + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_xchg(flags + first + tl.program_id(0), 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit(do_not_specialize=["rank"])
def _share_kernel(row, addresses, rank, n, BLOCK: tl.constexpr):
    """The row of this rank to one rank."""
    to = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(row.dtype.element_ty)) + rank * n
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(row + at, mask=at < n), mask=at < n)


@triton.jit
def _send_kernel(
    x, order, to, addresses, n, slots, room, D, stride,
    INDIRECT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks of columns of some rows to where they go."""
    columns = tl.cdiv(D, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(n, TOKENS) * columns, tl.num_programs(0)):
        row = tile // columns * TOKENS + tl.arange(0, TOKENS)
        column = tile % columns * BLOCK + tl.arange(0, BLOCK)
        goes = tl.load(to + row, mask=row < n, other=-1)
        used = goes >= 0
        source = row
        if INDIRECT:
            source = tl.load(order + row, mask=used, other=0) // slots
        inside = used[:, None] & (column < D)[None, :]
        value = tl.load(x + source.to(tl.int64)[:, None] * stride + column[None, :], mask=inside)
        goes = tl.where(used, goes, 0)
        memory = tl.load(addresses + goes // room).to(tl.pointer_type(x.dtype.element_ty))
        memory = tl.multiple_of(memory, [16])
        tl.store(memory[:, None] + (goes % room).to(tl.int64)[:, None] * D + column[None, :], value, mask=inside)


@triton.jit
def _take_kernel(written, came, out, n, D, ZERO_REST: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of some rows that others wrote; where none did zeros or (``ZERO_REST`` false) nothing."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(came + row, mask=row < n, other=-1) >= 0
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    inside = (column < D)[None, :]
    value = tl.load(written + at, mask=used[:, None] & inside, other=0.0)
    kept = row < n if ZERO_REST else used
    tl.store(out + at, value, mask=kept[:, None] & inside)


@triton.jit
def _segments_kernel(counts, place, ends, begins, offsets, P, E, room, SEGMENTS: tl.constexpr):
    """Where each segment of rows ends, and where it begins on the other side: the tokens' segments (program 0) and the
    experts' (program 1), with the end of each expert's rows."""
    rank, here = tl.load(place), E // P
    segment = tl.arange(0, SEGMENTS)
    inside = segment < E
    if tl.program_id(0) == 0:  # by expert
        own, before = tl.zeros([SEGMENTS], tl.int32), tl.zeros([SEGMENTS], tl.int32)
        total = tl.zeros([SEGMENTS], tl.int32)
        for other in range(P):
            found = tl.load(counts + other * E + segment, mask=inside, other=0)
            own += tl.where(other == rank, found, 0)
            before += tl.where(other < rank, found, 0)
            total += found
        begin = tl.cumsum(total, 0) - total + before
        for other in range(P):  # counted among the experts of one rank
            lower = tl.sum(tl.where(segment < other * here, total, 0), 0)
            begin -= tl.where(segment // here == other, lower, 0)
        tl.store(ends + segment, tl.cumsum(own, 0), mask=inside)
        tl.store(begins + segment, begin, mask=inside)
    else:  # by the expert here, then by rank
        for other in range(P):
            found = tl.load(counts + other * E + segment, mask=inside, other=0)
            mine = inside & (segment // here == rank)
            tl.store(begins + E + (segment - rank * here) * P + other, tl.cumsum(found, 0) - found, mask=mine)
        held = tl.load(counts + segment % P * E + rank * here + segment // P, mask=inside, other=0)
        end = tl.cumsum(held, 0)
        tl.store(ends + E + segment, end, mask=inside)
        tl.store(offsets + segment // P, tl.minimum(end, room), mask=inside & (segment % P == P - 1))


@triton.jit
def _places_kernel(ends, begins, there, back, P, E, n, room, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Where some rows of the tokens go to, or some rows of the experts come from."""
    block, blocks = tl.program_id(0), tl.cdiv(n, ROWS)
    if block < blocks:
        segment, row, to = _follow(ends, begins, block, E, ROWS, AHEAD)
        found = tl.where((segment < E) & (to < room), segment // (E // P) * room + to, -1)
        tl.store(there + row, found, mask=row < n)
    else:
        segment, row, to = _follow(ends + E, begins + E, block - blocks, E, ROWS, AHEAD)
        found = tl.where((segment < E) & (to < n), segment % P * n + to, -1)
        tl.store(back + row, found, mask=row < room)


@triton.jit
def _follow(ends, begins, block, E, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """(the segment of each row of a block, E after the last; the rows; where they are at the other side)."""
    row = block * ROWS + tl.arange(0, ROWS)
    segment = tl.zeros([ROWS], tl.int32)
    for first in range(0, E, AHEAD):
        other = first + tl.arange(0, AHEAD)
        end = tl.load(ends + other, mask=other < E, other=2147483647)
        segment += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    used = segment < E
    start = tl.load(ends + segment - 1, mask=used & (segment > 0), other=0)
    return segment, row, row - start + tl.load(begins + segment, mask=used, other=0)


def tell(addresses: Tensor, rank: int, channel: int) -> None:
    """Set the flags of ``rank`` at all ranks."""
    ranks = addresses.shape[1]
    _tell_kernel[(ranks,)](addresses, ranks, channel * ranks + rank, num_warps=1)


def wait(addresses: Tensor, rank: int, channel: int) -> None:
    """Wait at ``rank`` for the flags of all ranks, and take them back."""
    ranks = addresses.shape[1]
    _wait_kernel[(ranks,)](addresses, ranks, rank, channel * ranks, num_warps=1)


def share(row: Tensor, addresses: Tensor, rank: int) -> None:
    """``row`` (n,), contiguous, to row ``rank`` of all ranks' memory."""
    _share_kernel[(addresses.shape[1],)](row, addresses, rank, row.numel(), BLOCK=256, num_warps=4)


def configuration(nbytes: int, x: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tile of ``x`` of ``nbytes``."""
    return tile_of(nbytes // x.element_size(), x.shape[1])


def send(
    x: Tensor, order: Tensor | None, slots: int, to: Tensor, room: int, addresses: Tensor, narrow: bool = False
) -> None:
    """Send n rows: row r is ``x[order[r] // slots]`` (``x[r]`` without ``order``), and goes to rank ``to[r] // room``,
    row ``to[r] % room``. ``narrow``: launch by `NARROW` instead of `WIDE`."""
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    n, D = to.shape[0], x.shape[1]
    if not (n and D and room):
        return
    nbytes, warps, senders = NARROW if narrow else WIDE
    tokens, block = configuration(nbytes, x)
    tiles = triton.cdiv(n, tokens) * triton.cdiv(D, block)
    _send_kernel[(min(tiles, senders),)](
        x, order, to, addresses, n, slots, room, D, x.stride(0),
        INDIRECT=order is not None, TOKENS=tokens, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def take(written: Tensor, came: Tensor, zero_rest: bool = True) -> Tensor:
    """A new tensor of the rows of ``written`` (n, D), contiguous; where ``came`` (n,) is -1 zeros or, without
    ``zero_rest``, anything."""
    (n, D), out = written.shape, torch.empty_like(written)
    if out.numel():
        tokens, block = configuration(TAKEN, written)
        _take_kernel[(triton.cdiv(n, tokens), triton.cdiv(D, block))](
            written, came, out, n, D, ZERO_REST=zero_rest, TOKENS=tokens, BLOCK=block, num_warps=WARPS
        )
    return out


def places(counts: Tensor, place: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `expert_rows.expert_places`."""
    counts, (P, E) = counts.contiguous(), counts.shape
    there, back, offsets = (counts.new_empty(n) for n in (rows, room, E // P))
    ends, begins = counts.new_empty(2, E), counts.new_empty(2, E)
    segments = max(triton.next_power_of_2(E), 32)
    _segments_kernel[(2,)](counts, place, ends, begins, offsets, P, E, room, SEGMENTS=segments, num_warps=4)
    blocks = triton.cdiv(rows, ROWS) + triton.cdiv(room, ROWS)
    if blocks:
        _places_kernel[(blocks,)](ends, begins, there, back, P, E, rows, room, ROWS=ROWS, AHEAD=AHEAD, num_warps=4)
    return there, back, offsets

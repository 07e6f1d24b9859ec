"""The Triton kernels of `gradient`: positions sorted by row of the table, in chunks that programs add up in order.

Sorted, the positions of a row are a run. A run inside a chunk is written straight to its row. A run that crosses chunks
leaves an fp32 partial sum in each, which the program of the chunk where it begins adds up: no row is written twice.
"""

import torch
import triton
import triton.language as tl

#: Sorted positions that a program adds up, and how many of them it loads at once.
CHUNK, AHEAD = 32, 8
#: Partial sums that a program of the second kernel loads at once.
PARTIALS = 16


@triton.jit
def _chunk_kernel(
    grad, order, rows, out, partial, N, D, num_weights, padding,
    CHUNK: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of chunk ``program_id(0)``: whole runs go to ``out``. The sum of a run that began before
    the chunk goes to ``partial[2 * chunk]``, that of one that continues after it to ``partial[2 * chunk + 1]``."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    first = chunk * CHUNK
    # No row is -1: it marks what lies before the first position and after the last.
    previous = tl.load(rows + first - 1, mask=first > 0, other=-1)
    row = tl.load(rows + first)
    own = False  # whether the run began in this chunk
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, AHEAD):
        # All loads of the stretch before the first sum: they are in flight together.
        values = ()
        after = ()
        for i in tl.static_range(AHEAD):
            at = first + start + i
            place = tl.load(order + at, mask=at < N, other=0)
            values += (tl.load(grad + place * D + columns, mask=inside & (at < N), other=0.0),)
            after += (tl.load(rows + at + 1, mask=at + 1 < N, other=-1),)
        for i in tl.static_range(AHEAD):
            begins = row != previous
            total = tl.where(begins, 0.0, total) + values[i].to(tl.float32)
            own = own | begins
            previous = row
            counts = (row >= 0) & (row < num_weights) & (row != padding)
            if counts & (after[i] != row):
                if own:
                    tl.store(out + row.to(tl.int64) * D + columns, total.to(out.dtype.element_ty), mask=inside)
                else:
                    tl.store(partial + 2 * chunk * D + columns, total, mask=inside)
            row = after[i]
    if row == previous:
        tl.store(partial + (2 * chunk + tl.where(own, 1, 0)) * D + columns, total, mask=inside)


@triton.jit
def _join_kernel(
    rows, partial, out, N, D, num_weights, padding,
    CHUNK: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of the row whose run begins in chunk ``program_id(0)`` and continues after it, if any."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    first = chunk * CHUNK
    last = first + CHUNK - 1
    row = tl.load(rows + last, mask=last < N, other=-1)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    after = tl.load(rows + last + 1, mask=last + 1 < N, other=-1)
    counts = (row >= 0) & (row < num_weights) & (row != padding)
    if counts & (row != before) & (row == after):
        total = tl.load(partial + (2 * chunk + 1) * D + columns, mask=inside, other=0.0)
        which = chunk + 1 + tl.arange(0, PARTIALS)
        more = True
        while more:
            # The chunks that begin with this row follow each other.
            belongs = tl.load(rows + which * CHUNK, mask=which * CHUNK < N, other=-1) == row
            at = partial + 2 * which[:, None] * D + columns[None, :]
            total += tl.sum(tl.load(at, mask=belongs[:, None] & inside[None, :], other=0.0), 0)
            which += PARTIALS
            more = tl.min(belongs.to(tl.int32), 0) == 1
        tl.store(out + row.to(tl.int64) * D + columns, total.to(out.dtype.element_ty), mask=inside)


def configuration(D: int, size: int) -> tuple[int, int]:
    """(BLOCK, warps) of the chunks, for rows of ``D`` elements of ``size`` bytes: 16 bytes a thread, up to 4 warps."""
    block = min(max(triton.next_power_of_2(D), 32), 2048 // size)
    return block, max(block * size // 512, 1)


def join_configuration(D: int) -> tuple[int, int]:
    """(BLOCK, warps) of the second kernel: narrow, because one run may be all there is."""
    return min(max(triton.next_power_of_2(D), 32), 128), 4


def launch(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int) -> torch.Tensor:
    """As `gradient.embedding_backward`."""
    D, N = grad.shape[-1], indices.numel()
    out = grad.new_zeros(num_weights, D)
    if not N or not out.numel():
        return out
    # A radix sort takes a pass for every byte of its keys.
    narrow = indices.to(torch.int32) if num_weights < 2**31 else indices
    rows, order = narrow.flatten().sort(stable=True)
    chunks = triton.cdiv(N, CHUNK)
    partial = torch.empty(2 * chunks, D, dtype=torch.float32, device=grad.device)
    block, warps = configuration(D, grad.element_size())
    _chunk_kernel[(chunks, triton.cdiv(D, block))](
        grad.contiguous(), order, rows, out, partial, N, D, num_weights, padding_idx,
        CHUNK=CHUNK, AHEAD=AHEAD, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    block, warps = join_configuration(D)
    _join_kernel[(chunks, triton.cdiv(D, block))](
        rows, partial, out, N, D, num_weights, padding_idx,
        CHUNK=CHUNK, PARTIALS=PARTIALS, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out

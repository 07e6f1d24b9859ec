"""The Triton kernels of `route`: a counting sort of the slots in blocks.

Each block counts its slots of every expert; each expert adds up its counts over the blocks; each block puts its slots
after the rows of lower experts, of earlier blocks, and its own earlier ones of the same expert.
"""

import torch
import triton
import triton.language as tl

#: Slots of a block, and how many slots or experts a program compares with its block at once.
BLOCK, AHEAD = 256, 32
WARPS = 8


@triton.jit
def _expert(chosen, at, n, E):
    """The expert of each slot ``at``; E for one that is not used."""
    expert = tl.load(chosen + at, mask=at < n, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def _count_kernel(chosen, starts, n, E, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """``starts[e, block]``: slots of expert e in this block."""
    block = tl.program_id(0)
    found = tl.histogram(_expert(chosen, block * BLOCK + tl.arange(0, BLOCK), n, E), BINS)
    expert = tl.arange(0, BINS)
    tl.store(starts + expert * blocks + block, found, mask=expert < E)


@triton.jit
def _scan_kernel(starts, counts, blocks, AT_ONCE: tl.constexpr):
    """``starts[e, block]``: slots of expert e in earlier blocks, of one expert; ``counts[e]``: all its slots."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        found = tl.load(starts + expert * blocks + block, mask=block < blocks, other=0)
        tl.store(starts + expert * blocks + block, total + tl.cumsum(found, 0) - found, mask=block < blocks)
        total += tl.sum(found, 0)
    tl.store(counts + expert, total)


@triton.jit
def _place_kernel(chosen, starts, counts, order, places, n, E, blocks, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """The rows of a block's slots, and -1 in those rows of ``order`` with the block's numbers that no slot has."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert(chosen, at, n, E)
    used = expert < E
    row = tl.load(starts + expert * blocks + block, mask=used, other=0)
    for first in range(0, BLOCK, AHEAD):  # earlier slots of the block
        other = block * BLOCK + first + tl.arange(0, AHEAD)
        same = _expert(chosen, other, n, E)[None, :] == expert[:, None]
        row += tl.sum((same & (other[None, :] < at[:, None])).to(tl.int32), 1)
    total = 0
    for first in range(0, E, AHEAD):  # lower experts
        lower = first + tl.arange(0, AHEAD)
        count = tl.load(counts + lower, mask=lower < E, other=0)
        row += tl.sum(tl.where(lower[None, :] < expert[:, None], count[None, :], 0), 1)
        total += tl.sum(count, 0)
    tl.store(places + at, tl.where(used, row, -1), mask=at < n)
    tl.store(order + row, at, mask=used)
    tl.store(order + at, tl.full([BLOCK], -1, tl.int32), mask=(at < n) & (at >= total))


def launch(chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `route.sort_by_expert`."""
    chosen, n = chosen.contiguous(), chosen.numel()
    blocks = triton.cdiv(n, BLOCK)
    order = torch.empty(n, dtype=torch.int32, device=chosen.device)
    places = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(n_experts, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(n_experts, blocks, dtype=torch.int32, device=chosen.device)
    bins = max(triton.next_power_of_2(n_experts + 1), 32)
    _count_kernel[(blocks,)](chosen, starts, n, n_experts, blocks, BLOCK=BLOCK, BINS=bins, num_warps=WARPS)
    _scan_kernel[(n_experts,)](starts, counts, blocks, AT_ONCE=1024, num_warps=4)
    _place_kernel[(blocks,)](
        chosen, starts, counts, order, places, n, n_experts, blocks, BLOCK=BLOCK, AHEAD=AHEAD, num_warps=WARPS
    )
    return order, places, counts

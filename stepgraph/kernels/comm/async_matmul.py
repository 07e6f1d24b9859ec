"""Matrix products pipelined, chunk by chunk, with the collective that gathers their operand or reduces their result.

    all_gather_matmul      gather the sequence over the ranks of a group, times one or several matrices
    matmul_reduce_scatter  the sum of one or several products, summed over ranks, each of which keeps its part

To gather, a rank multiplies its own chunk while it sends it, and the others' as they arrive. To reduce, it first
computes what the others need, and its own part while that is sent (see `exchange`). Sums over ranks are taken in the
order of ranks, in fp32, and rounded once. In a CUDA graph that is replayed they need `Session.fence` before each run.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", 2023.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from stepgraph import compat
from stepgraph.kernels.comm.exchange import current, operator

Tensor = torch.Tensor


def all_gather_matmul(shard: Tensor, weights: Sequence[Tensor], keep: bool, group: dist.ProcessGroup) -> list[Tensor]:
    """(B, T / ranks, K), this rank's part of the sequence, and matrices (K, N) -> [(B, T, K),] (B * T, N), ...

    The gathered tensor comes first and only with ``keep``.
    """
    return torch.ops.stepgraph.all_gather_matmul(shard, weights, keep, group.size(), group.group_name)


def matmul_reduce_scatter(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], batch: int, group: dist.ProcessGroup
) -> Tensor:
    """(B * T, K), ... and (K, N), ... -> (B, T / ranks, N): this rank's part of the sum of products over all ranks."""
    return torch.ops.stepgraph.matmul_reduce_scatter(lefts, rights, batch, group.size(), group.group_name)


def _new_gathered(shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, group_name: str) -> list[Tensor]:
    batch, rows, inner = shard.shape
    gathered = [shard.new_empty(batch, group_size * rows, inner)] if keep else []
    return gathered + [shard.new_empty(batch * group_size * rows, w.shape[1]) for w in weights]


@operator(
    "all_gather_matmul(Tensor shard, Tensor[] weights, bool keep, int group_size, str group_name) -> Tensor[]",
    _new_gathered,
)
def _gather(shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, group_name: str) -> list[Tensor]:
    batch, rows, inner = shard.shape
    shard = shard.contiguous()
    # A chunk's rows of one sequence lie together in the result, so that products are written where they belong.
    products = [shard.new_empty(batch, group_size, rows, w.shape[1]) for w in weights]
    parts = shard.new_empty(group_size, batch, rows, inner) if keep else None

    def consume(rank: int, part: Tensor) -> None:
        for product, weight in zip(products, weights, strict=True):
            for i in range(batch):
                torch.mm(part[i], weight, out=product[i, rank])

    ranks = current().begin(compat.process_group(group_name), shard)
    for peer in reversed(ranks.others):  # who takes this part first
        ranks.send(peer, shard)
    if keep:
        ranks.copy(parts[ranks.rank], shard)
    consume(ranks.rank, shard)
    for peer in ranks.others:
        part = ranks.take(peer)
        if keep:
            ranks.copy(parts[peer], part)
        consume(peer, part)
    ranks.finish()
    gathered = [parts.transpose(0, 1).reshape(batch, -1, inner)] if keep else []
    return gathered + [product.view(-1, product.shape[-1]) for product in products]


@operator(
    "matmul_reduce_scatter(Tensor[] lefts, Tensor[] rights, int batch, int group_size, str group_name) -> Tensor",
    lambda a, b, batch, ranks, _: a[0].new_empty(batch, a[0].shape[0] // batch // ranks, b[0].shape[1]),
)
def _scatter(lefts: list[Tensor], rights: list[Tensor], batch: int, group_size: int, group_name: str) -> Tensor:
    columns = rights[0].shape[1]
    parts = [left.contiguous().view(batch, group_size, -1, left.shape[1]) for left in lefts]
    own = lefts[0].new_empty(batch, parts[0].shape[2], columns)

    def produce(rank: int, chunk: Tensor) -> Tensor:
        for i in range(batch):
            torch.mm(parts[0][i, rank], rights[0], out=chunk[i])
            for part, right in zip(parts[1:], rights[1:], strict=True):
                chunk[i].addmm_(part[i, rank], right)
        return chunk

    ranks = current().begin(compat.process_group(group_name), own)
    for peer in reversed(ranks.others):
        ranks.send(peer, produce(peer, torch.empty_like(own)))
    produce(ranks.rank, own)
    taken = {peer: ranks.take(peer) for peer in ranks.others} | {ranks.rank: own}
    if group_size == 2:  # rounded once, in either order
        total = own.add_(taken[ranks.others[0]])
    else:
        total = taken[0].to(torch.promote_types(own.dtype, torch.float32))
        for rank in range(1, group_size):
            total = total + taken[rank]
        total = total.to(own.dtype)
    ranks.finish()
    return total


register_flop_formula(torch.ops.stepgraph.all_gather_matmul)(
    lambda shard, weights, _, ranks, *__, **___: sum(2 * ranks * shard.numel() * w[1] for w in weights)
)
register_flop_formula(torch.ops.stepgraph.matmul_reduce_scatter)(
    lambda lefts, rights, *_, **__: sum(2 * left.numel() * right[1] for left, right in zip(lefts, rights, strict=True))
)

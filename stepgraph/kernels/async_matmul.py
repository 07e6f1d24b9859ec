"""Matrix products that run while a collective brings their operand, or takes their result, chunk by chunk.

    all_gather_matmul      gather the sequence over the ranks of a group, times one or several matrices
    matmul_reduce_scatter  the sum of one or several products, summed over ranks, each of which keeps its part

On CUDA the chunks travel through symmetric memory, copied by the ranks themselves over NVLink without multicast, in
torch's own pipeline (two streams that take turns). On a CPU they are sent point to point, all started before the
first product is computed. Sums over ranks are taken in the order of ranks, in fp32, and rounded once.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", 2023.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from stepgraph import compat

Tensor = torch.Tensor

torch.library.define(
    "stepgraph::all_gather_matmul",
    "(Tensor shard, Tensor[] weights, bool keep, int group_size, str group_name) -> Tensor[]",
)
torch.library.define(
    "stepgraph::matmul_reduce_scatter",
    "(Tensor[] lefts, Tensor[] rights, int batch, int group_size, str group_name) -> Tensor",
)


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


@torch.library.register_fake("stepgraph::all_gather_matmul")
def _(shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, group_name: str) -> list[Tensor]:
    batch, rows, inner = shard.shape
    gathered = [shard.new_empty(batch, group_size * rows, inner)] if keep else []
    return gathered + [shard.new_empty(batch * group_size * rows, w.shape[1]) for w in weights]


@torch.library.register_fake("stepgraph::matmul_reduce_scatter")
def _(lefts: list[Tensor], rights: list[Tensor], batch: int, group_size: int, group_name: str) -> Tensor:
    return lefts[0].new_empty(batch, lefts[0].shape[0] // batch // group_size, rights[0].shape[1])


@register_flop_formula(torch.ops.stepgraph.all_gather_matmul)
def _(shard: torch.Size, weights: list[torch.Size], keep: bool, group_size: int, *args: Any, **kwargs: Any) -> int:
    return sum(2 * group_size * shard.numel() * w[1] for w in weights)


@register_flop_formula(torch.ops.stepgraph.matmul_reduce_scatter)
def _(lefts: list[torch.Size], rights: list[torch.Size], *args: Any, **kwargs: Any) -> int:
    return sum(2 * left.numel() * right[1] for left, right in zip(lefts, rights, strict=True))


def _gather_all(
    shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, run: Callable[[Callable, Tensor, Tensor], None]
) -> list[Tensor]:
    """``run(consume, shard, parts)`` calls ``consume(part, rank)`` with every rank's ``part``, and fills ``parts``,
    (ranks * B, T / ranks, K), rank after rank."""
    batch, rows, inner = shard.shape
    parts = shard.new_empty(group_size * batch, rows, inner)
    # A chunk's rows of one sequence lie together in the result, so that products are written where they belong.
    products = [shard.new_empty(batch, group_size, rows, w.shape[1]) for w in weights]

    def consume(part: Tensor, rank: int) -> None:
        for product, weight in zip(products, weights, strict=True):
            for i in range(batch):
                torch.mm(part[i], weight, out=product[i, rank])

    run(consume, shard.contiguous(), parts)
    gathered = [parts.view(group_size, batch, rows, inner).transpose(0, 1).reshape(batch, -1, inner)] if keep else []
    return gathered + [product.view(-1, product.shape[-1]) for product in products]


def _scatter_sum(
    lefts: list[Tensor],
    rights: list[Tensor],
    batch: int,
    group_size: int,
    run: Callable[[Callable, Tensor], None],
) -> Tensor:
    """``run(produce, terms)`` calls ``produce(rank, out)`` for the part of every rank, and fills ``terms``,
    (ranks * B * T / ranks, N), with what each rank produced for this one."""
    columns = rights[0].shape[1]
    parts = [left.view(batch, group_size, -1, left.shape[1]) for left in lefts]
    rows = parts[0].shape[2]
    terms = lefts[0].new_empty(group_size * batch * rows, columns)

    def produce(rank: int, out: Tensor) -> None:
        chunk = out.view(batch, rows, columns)
        for i in range(batch):
            torch.mm(parts[0][i, rank], rights[0], out=chunk[i])
            for part, right in zip(parts[1:], rights[1:], strict=True):
                chunk[i].addmm_(part[i, rank], right)

    run(produce, terms)
    terms = terms.view(group_size, batch, rows, columns)
    return terms.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32)).to(terms.dtype)


@torch.library.impl("stepgraph::all_gather_matmul", "CUDA")
def _(shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, group_name: str) -> list[Tensor]:
    def run(consume: Callable, shard: Tensor, parts: Tensor) -> None:
        compat.symmetric_all_gather(shard, consume, parts, group_name, keep)

    return _gather_all(shard, weights, keep, group_size, run)


@torch.library.impl("stepgraph::matmul_reduce_scatter", "CUDA")
def _(lefts: list[Tensor], rights: list[Tensor], batch: int, group_size: int, group_name: str) -> Tensor:
    def run(produce: Callable, terms: Tensor) -> None:
        compat.symmetric_all_to_all(produce, terms, group_name)

    return _scatter_sum([left.contiguous() for left in lefts], rights, batch, group_size, run)


@torch.library.impl("stepgraph::all_gather_matmul", "CPU")
def _(shard: Tensor, weights: list[Tensor], keep: bool, group_size: int, group_name: str) -> list[Tensor]:
    group = compat.process_group(group_name)
    own = group.rank()

    def run(consume: Callable, shard: Tensor, parts: Tensor) -> None:
        chunks = parts.chunk(group_size)
        others = [(own + step) % group_size for step in range(1, group_size)]
        sent = [dist.isend(shard, group=group, group_dst=rank) for rank in reversed(others)]
        coming = [dist.irecv(chunks[rank], group=group, group_src=rank) for rank in others]
        consume(shard, own)
        for rank, work in zip(others, coming, strict=True):
            work.wait()
            consume(chunks[rank], rank)
        chunks[own].copy_(shard)
        for work in sent:
            work.wait()

    return _gather_all(shard, weights, keep, group_size, run)


@torch.library.impl("stepgraph::matmul_reduce_scatter", "CPU")
def _(lefts: list[Tensor], rights: list[Tensor], batch: int, group_size: int, group_name: str) -> Tensor:
    group = compat.process_group(group_name)
    own = group.rank()

    def run(produce: Callable, terms: Tensor) -> None:
        chunks = terms.chunk(group_size)
        others = [(own + step) % group_size for step in range(1, group_size)]
        coming = [dist.irecv(chunks[rank], group=group, group_src=rank) for rank in reversed(others)]
        sent = []
        for rank in others:
            outgoing = torch.empty_like(chunks[rank])
            produce(rank, outgoing)
            sent.append((dist.isend(outgoing, group=group, group_dst=rank), outgoing))  # kept until it is sent
        produce(own, chunks[own])
        for work in (*coming, *(work for work, _ in sent)):
            work.wait()

    return _scatter_sum([left.contiguous() for left in lefts], rights, batch, group_size, run)

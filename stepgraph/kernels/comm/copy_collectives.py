"""All-gathers and reduce-scatters by copy engines, which leave the GPU's multiprocessors to other work.

    token = gather_begin(shards, ...)        they are copied into the wholes, from where each peer is sent them
    wholes = gather_end(token, ...)          each shard's whole: (ranks * numel,), rank after rank
    token = reduce_begin(grads, ...)         each peer is sent its part of every gradient, from where it lies
    parts = reduce_end(token, grads, ...)    this rank's part of the sums, or means, in the order of ranks

NCCL's kernels take multiprocessors from concurrent matrix products; here the copy engines move the data (see
`exchange`), and what begins and ends a collective runs between two products. Gradients travel in their own dtype from
where they lie, which they do until the end, and are added in float32 or wider. Collectives of one kind and group
end in the order in which they begin.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.kernels.comm.exchange import Place, Ranks, Session, current, operator

Tensor = torch.Tensor

#: Bytes from which on a copy of its own is worth its launch.
_LARGE = 2**22


class _Begun(NamedTuple):
    """A collective under way."""

    serial: int
    """Unlike any other's of this process."""
    number: int
    """Where its parts go: another place than for collectives of the kind that are under way at the same time."""
    ranks: Any
    """What ``begin`` of `start` gave; its ``join`` makes the current stream wait for the copies."""


_serials = itertools.count()


def start(kind: str, group_name: str, begin: Callable[[dist.ProcessGroup, Place], Any]) -> Any:
    """What ``begin(group, place)`` gives, which is then under way until it is the `oldest`."""
    group = compat.process_group(group_name)
    under_way = current().under_way[kind, group.group_name]
    taken = {begun.number for begun in under_way}
    number = next(i for i in range(len(taken) + 1) if i not in taken)
    under_way.append(_Begun(next(_serials), number, begin(group, (kind, number))))
    return under_way[-1].ranks


def oldest(kind: str, group_name: str) -> Any:
    """Remove and return the oldest collective under way."""
    return current().under_way[kind, compat.process_group(group_name).group_name].pop(0).ranks


class _Gather(NamedTuple):
    ranks: Ranks
    wholes: list[Tensor]
    """What this rank gathers, (ranks, n) each, its own row filled in."""

    def join(self) -> None:
        self.ranks.join()


def under_way(session: Session) -> list[int]:
    """Which collectives are under way, by numbers that never come again."""
    return [begun.serial for collectives in session.under_way.values() for begun in collectives]


def join(session: Session) -> None:
    """Let the current stream wait for all copies under way: a CUDA graph may not end before what it began."""
    for collectives in session.under_way.values():
        for begun in collectives:
            begun.ranks.join()


@operator(
    "gather_begin(Tensor[] shards, int[] sizes, ScalarType dtype, int group_size, str group_name) -> Tensor",
    lambda shards, *_: shards[0].new_empty(1),
)
def _gather_begin(
    shards: list[Tensor], sizes: list[int], dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    wholes = [shards[0].new_empty(group_size, size, dtype=dtype) for size in sizes]
    own = [whole[group.rank()] for whole in wholes]
    numels = [shard.numel() for shard in shards]
    places = own if sizes == numels else own[0].split(numels)
    torch._foreach_copy_(list(places), [shard.reshape(-1) for shard in shards])
    like = wholes[0].new_empty(1).expand(sum(sizes))
    ranks, _ = start("gather", group_name, lambda group, at: _Gather(current().begin(group, like, at), wholes))
    for peer in reversed(ranks.others):
        ranks.send(peer, *own)
    return shards[0].new_empty(1)


@operator(
    "gather_end(Tensor token, int[] sizes, ScalarType dtype, int group_size, str group_name) -> Tensor[]",
    lambda token, sizes, dtype, ranks, _: [token.new_empty(ranks * size, dtype=dtype) for size in sizes],
)
def _gather_end(token: Tensor, sizes: list[int], dtype: torch.dtype, group_size: int, group_name: str) -> list[Tensor]:
    ranks, wholes = oldest("gather", group_name)
    pieces: list[tuple[Tensor, Tensor]] = []
    for rank in ranks.others:
        part = ranks.take(rank)
        pieces += ((whole[rank], piece) for whole, piece in zip(wholes, part.split(sizes), strict=True))
    # One copy after the other is faster than one kernel for all, which is for many small ones.
    small = [(to, piece) for to, piece in pieces if piece.nbytes < _LARGE]
    for to, piece in pieces:
        if piece.nbytes >= _LARGE:
            to.copy_(piece)
    if small:
        torch._foreach_copy_(*map(list, zip(*small, strict=True)))
    ranks.finish()
    return [whole.view(-1) for whole in wholes]


def _rows(grads: list[Tensor], group_size: int) -> list[Tensor]:
    """Each gradient as a matrix with a row per rank."""
    return [grad.view(group_size, -1) for grad in grads]


@operator(
    "reduce_begin(Tensor[] grads, int group_size, str group_name) -> Tensor", lambda grads, *_: grads[0].new_empty(1)
)
def _reduce_begin(grads: list[Tensor], group_size: int, group_name: str) -> Tensor:
    rows = _rows(grads, group_size)
    size = sum(row.shape[1] for row in rows)
    like = rows[0].new_empty(1).expand(size)
    ranks = start("reduce", group_name, lambda group, place: current().begin(group, like, place))
    for peer in reversed(ranks.others):
        ranks.send(peer, *(row[peer] for row in rows))
    return grads[0].new_empty(1)


@operator(
    "reduce_end(Tensor token, Tensor[] grads, bool mean, ScalarType dtype, int group_size, str group_name) -> Tensor",
    lambda token, grads, _, dtype, ranks, __: token.new_empty(sum(g.numel() for g in grads) // ranks, dtype=dtype),
)
def _reduce_end(
    token: Tensor, grads: list[Tensor], mean: bool, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    ranks = oldest("reduce", group_name)
    rows = _rows(grads, group_size)
    sizes = [row.shape[1] for row in rows]
    taken = {peer: ranks.take(peer).split(sizes) for peer in ranks.others}
    taken[ranks.rank] = [row[ranks.rank] for row in rows]
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    result = token.new_empty(sum(sizes), dtype=dtype)
    for i, to in enumerate(result.split(sizes)):
        total = taken[0][i]
        for rank in range(1, group_size):
            last = rank == group_size - 1
            out = to if last else torch.empty_like(to, dtype=wide)
            total = _add(total, taken[rank][i], group_size if mean and last else 1, out)
    ranks.finish()
    return result


def _add(a: Tensor, b: Tensor, divisor: int, out: Tensor) -> Tensor:
    """``out``, (n,): ``(a + b) / divisor``, computed in float32 or wider and rounded once."""
    if a.is_cuda:
        from stepgraph.kernels.comm.copy_collectives_triton import add

        return add(a, b, divisor, out)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return out.copy_((a.to(wide) + b.to(wide)) / divisor)

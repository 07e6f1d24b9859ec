"""Sends token rows to the ranks that have their experts, and back: only existing rows.

    token = counts_begin(counts, ...)                     each rank sends the others its row count per expert
    counts, place = counts_end(token, counts, ...)        (P, E) of all ranks, and this rank's place among them
    there, back, ends = expert_places(counts, place, n, room)
    token = rows_begin(x, order, slots, to, came, ...)    each row leaves for where its reader needs it
    rows = rows_end(token, x, came, ...)                  a new tensor, once all ranks' rows are there

Two sides have rows. A rank's *tokens* have n, sorted by expert: all that it sends. Its *experts* have room for so
many, sorted by expert, of one expert in the order of ranks and then of tokens: what they compute with. ``there`` says
for each row of the tokens where it stands among expert rows, as ``rank * room + row``, and ``back`` for each row of
the experts where it stands among tokens' rows, as ``rank * n + row``; -1 is no row. Rows travel to experts with
(to, came) = (there, back), and to tokens with (back, there): the one is the other's gradient.

On CUDA a kernel writes rows straight into the memory of other ranks (symmetric memory over NVLink, without multicast),
on a second stream. What others wrote is copied out where the exchange ends: no result lies in memory
that the next exchange writes. On a CPU rows go point to point over the group, gloo's, as many as there are. Exchanges
of one kind and group end in the order in which they begin.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.kernels.ahead import launching
from stepgraph.kernels.comm.copy_collectives import oldest, start
from stepgraph.kernels.comm.exchange import COME, FREE, Place, current, operator

Tensor = torch.Tensor


# What is under way. On a CPU messages, awaited from the beginning; on CUDA what kernels write.


def _writes(x: Tensor) -> bool:
    """Whether ranks write into each other's memory, or send messages."""
    return x.is_cuda


class _Messages(NamedTuple):
    """``sent``: on its way, kept until it has left. ``coming``: for each part its rows here and what arrives."""

    sent: list[tuple[dist.Work, Tensor]]
    coming: list[tuple[Tensor, Tensor, dist.Work | None]]

    def join(self) -> None:
        pass  # there is no second stream

    def take(self, like: Tensor, came: Tensor | None, zero_rest: bool = True) -> Tensor:
        new = like.new_zeros if zero_rest else like.new_empty
        out = new(len(self.coming) if came is None else len(came), like.shape[-1])
        for at, part, work in self.coming:
            if work is not None:
                work.wait()
            out[at] = part
        for work, _ in self.sent:
            work.wait()
        return out


def _by_messages(parts: list[Tensor], places: list[Tensor], group: dist.ProcessGroup) -> _Messages:
    """``parts[r]`` (rows, D) goes to rank r, whose own stands at the rows ``places[r]`` here. Empty ones do not go."""
    current().count += 1
    messages, rank = _Messages([], []), group.rank()
    for peer, (part, at) in enumerate(zip(parts, places, strict=True)):
        if peer == rank:
            messages.coming.append((at, part, None))
            continue
        if at.numel():
            coming = part.new_empty(at.numel(), part.shape[1])
            messages.coming.append((at, coming, dist.irecv(coming, group=group, group_src=peer)))
        if part.numel():
            messages.sent.append((dist.isend(part, group=group, group_dst=peer), part))
    return messages


def _of_rank(encoded: Tensor, rows: int, ranks: int) -> list[Tensor]:
    """For each rank the indices of ``encoded``, ``rank * rows + row``, that name it, in order."""
    named = encoded.div(max(rows, 1), rounding_mode="floor")  # -1 stays
    return [(named == rank).nonzero().flatten() for rank in range(ranks)]


class _Written:
    """What ranks write into each other's memory, at a ``place`` that no other exchange under way has: once all have
    said that it is free, and before this rank says that it has."""

    def __init__(self, group: dist.ProcessGroup, place: Place, nbytes: int, device: torch.device):
        current().count += 1
        self.workspace = current().shared(group, nbytes, device, place)
        self.rank, self.ranks, self.kept, self.side_stream_busy = group.rank(), group.size(), (), False

    def tell(self, channel: int) -> None:
        """All ranks see the flag of this one."""
        _kernels().tell(self.workspace.addresses, self.rank, channel)

    def wait(self, channel: int) -> None:
        """The current stream waits for the flags of all ranks."""
        _kernels().wait(self.workspace.addresses, self.rank, channel)

    def send(self, x: Tensor, order: Tensor | None, slots: int, to: Tensor, room: int, narrow: bool) -> None:
        """On the second stream; what it reads is kept until the exchange ends."""
        self.kept, self.side_stream_busy = (x, order, to), True
        side = self.workspace.stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.wait(FREE)
            _kernels().send(x, order, slots, to, room, self.workspace.addresses, narrow)
            self.tell(COME[0])

    def share(self, row: Tensor) -> None:
        """``row`` (n,) to all ranks, at this rank's row of theirs."""
        self.wait(FREE)
        _kernels().share(row, self.workspace.addresses, self.rank)
        self.tell(COME[0])

    def join(self) -> None:
        if self.side_stream_busy:
            torch.cuda.current_stream().wait_stream(self.workspace.stream)
        self.side_stream_busy = False

    def take(self, like: Tensor, came: Tensor | None, zero_rest: bool = True) -> Tensor:
        """What was written here: a row for each of ``came``, of all ranks where it is None; where ``came`` is -1
        zeros or, without ``zero_rest``, anything."""
        self.join()
        self.wait(COME[0])
        shape = (self.ranks if came is None else came.shape[0], like.shape[-1])
        written = self.workspace.memory.get_buffer(self.rank, shape, like.dtype, 0)
        taken = written.clone() if came is None else _kernels().take(written, came, zero_rest)
        self.tell(FREE)
        return taken


@functools.cache
def _kernels() -> Any:
    """Those of CUDA; triton is imported on first use."""
    from stepgraph.kernels.comm import expert_rows_triton

    return expert_rows_triton


# What `_Written` launches, for `stepgraph.kernels.ahead`: the same for every rank, and wherever its memory lies.


def _addresses(like: Tensor, ranks: int) -> Tensor:
    return like.new_empty(2, ranks, dtype=torch.int64)


@launching("counts_begin")
def _launch_counts(counts: Tensor, group_size: int, group_name: str) -> None:
    addresses = _addresses(counts, group_size)
    _kernels().wait(addresses, 0, FREE)
    _kernels().share(counts, addresses, 0)
    _kernels().tell(addresses, 0, COME[0])


@launching("counts_end")
def _launch_arrival(token: Tensor, like: Tensor, group_size: int, group_name: str) -> None:
    addresses = _addresses(like, group_size)
    _kernels().wait(addresses, 0, COME[0])
    _kernels().tell(addresses, 0, FREE)


@launching("rows_begin")
def _launch_rows(
    x: Tensor, order: Tensor | None, slots: int, to: Tensor, came: Tensor, group_size: int, group_name: str,
    narrow: bool = False,
) -> None:  # fmt: skip
    addresses = _addresses(x, group_size)
    _kernels().wait(addresses, 0, FREE)
    _kernels().send(x, order, slots, to, came.shape[0], addresses, narrow)
    _kernels().tell(addresses, 0, COME[0])


@launching("rows_end")
def _launch_taking(
    token: Tensor, x: Tensor, came: Tensor, group_size: int, group_name: str, zero_rest: bool = True
) -> None:
    _launch_arrival(token, x, group_size, group_name)
    _kernels().take(x.new_empty(came.shape[0], x.shape[1]), came, zero_rest)


# The operators


@operator(
    "counts_begin(Tensor counts, int group_size, str group_name) -> Tensor", lambda counts, *_: counts.new_empty(1)
)
def _counts_begin(counts: Tensor, group_size: int, group_name: str) -> Tensor:
    def begin(group: dist.ProcessGroup, place: Place) -> Any:
        if _writes(counts):
            written = _Written(group, place, group_size * counts.nbytes, counts.device)
            written.share(counts.contiguous())
            return written
        at = torch.arange(group_size).view(-1, 1)
        return _by_messages([counts.view(1, -1)] * group_size, list(at), group)

    start("counts", group_name, begin)
    return counts.new_empty(1)


@operator(
    "counts_end(Tensor token, Tensor counts, int group_size, str group_name) -> (Tensor, Tensor)",
    lambda token, counts, ranks, _: (counts.new_empty(ranks, counts.shape[0]), counts.new_empty(())),
)
def _counts_end(token: Tensor, counts: Tensor, group_size: int, group_name: str) -> tuple[Tensor, Tensor]:
    return oldest("counts", group_name).take(counts, None), counts.new_full((), compat.process_group(group_name).rank())


@operator(
    "rows_begin(Tensor x, Tensor? order, int slots, Tensor to, Tensor came, int group_size, str group_name, "
    "bool narrow=False) -> Tensor",
    lambda x, *_, **__: x.new_empty(1),
)
def _rows_begin(
    x: Tensor, order: Tensor | None, slots: int, to: Tensor, came: Tensor, group_size: int, group_name: str,
    narrow: bool = False,
) -> Tensor:  # fmt: skip
    room = came.shape[0]

    def begin(group: dist.ProcessGroup, place: Place) -> Any:
        if _writes(x):
            written = _Written(group, place, room * x.shape[1] * x.element_size(), x.device)
            written.send(x, order, slots, to, room, narrow)
            return written
        sent = _of_rank(to, room, group_size)
        parts = [x[at if order is None else order[at] // slots] for at in sent]
        return _by_messages(parts, _of_rank(came, to.shape[0], group_size), group)

    start("rows", group_name, begin)
    return x.new_empty(1)


@operator(
    "rows_end(Tensor token, Tensor x, Tensor came, int group_size, str group_name, bool zero_rest=True) -> Tensor",
    lambda token, x, came, *_: x.new_empty(came.shape[0], x.shape[1]),
)
def _rows_end(
    token: Tensor, x: Tensor, came: Tensor, group_size: int, group_name: str, zero_rest: bool = True
) -> Tensor:
    return oldest("rows", group_name).take(x, came, zero_rest)


def places_reference(counts: Tensor, place: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """`expert_places` in plain torch."""
    (ranks, experts), rank = counts.shape, int(place)
    here = experts // ranks
    own = slice(rank * here, (rank + 1) * here)
    counts = counts.long()
    before = counts.cumsum(1) - counts  # (P, E): of each rank's rows, where those of an expert begin
    of_expert = counts.sum(0).view(ranks, here)
    begins = (of_expert.cumsum(1) - of_expert).flatten() + counts[:rank].sum(0)  # (E,): of this rank's, at the experts'
    there = _spread(counts[rank], begins, torch.arange(experts) // here, rows, room)
    by_expert = counts[:, own].T.flatten()  # (E / P * P,)
    back = _spread(by_expert, before[:, own].T.flatten(), torch.arange(experts) % ranks, room, rows)
    return there, back, counts[:, own].sum(0).cumsum(0).clamp(max=room).int()


def _spread(counts: Tensor, begins: Tensor, rank: Tensor, rows: int, room: int) -> Tensor:
    """(rows,): where each row goes. They come in segments of ``counts``, which begin at ``begins`` of ``rank``; rows
    beyond its ``room`` go nowhere, nor do rows after the last segment."""
    ends, row = counts.cumsum(0), torch.arange(rows)
    segment = torch.searchsorted(ends, row, right=True)
    used = segment < len(counts)
    segment = segment.clamp(max=len(counts) - 1)
    to = begins[segment] + row - (ends - counts)[segment]
    return torch.where(used & (to < room), rank[segment] * room + to, -1).int()


def _new_places(counts: Tensor, place: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    ranks, experts = counts.shape
    return tuple(counts.new_empty(n, dtype=torch.int32) for n in (rows, room, experts // ranks))


@operator("expert_places(Tensor counts, Tensor place, int rows, int room) -> (Tensor, Tensor, Tensor)", _new_places)
@launching("expert_places")
def _expert_places(counts: Tensor, place: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    if _writes(counts):
        return _kernels().places(counts, place, rows, room)
    return places_reference(counts, place, rows, room)


# Public functions


def all_counts(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """``counts`` (E,) int32 of every rank of ``group``, (P, E), and this rank's place among them, () int32."""
    ops, where = torch.ops.stepgraph, (group.size(), group.group_name)
    return ops.counts_end(ops.counts_begin(counts, *where), counts, *where)


def expert_places(counts: Tensor, place: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows go to and come from.

    Args:
        counts: (P, E) int32, the rows of each rank for each expert; rank r has the experts from r * E / P on.
        place: () int32, this rank.
        rows: n, the rows that each rank sends at most.
        room: of each rank's experts, for rows.

    Returns:
        ``there`` (n,) int32: for each of this rank's rows, sorted by expert, ``rank * room + row`` of where it stands
        at its experts; -1 after the last row, and for rows that have no room there.
        ``back`` (room,) int32: for each row of the experts here ``rank * n + row`` of where it comes from; -1 after
        the last.
        ``ends`` (E / P,) int32: where the rows of each expert here end.
    """
    return torch.ops.stepgraph.expert_places(counts, place, rows, room)


def exchange_rows(
    x: Tensor, order: Tensor | None, slots: int, to: Tensor, came: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Row r goes to ``to[r]``, and what ``came`` names is here afterwards.

    Args:
        x: (N, D), fp32, bf16 or fp16, on a CPU fp64 too. Read until the exchange ends.
        order: (n,) int32, row r is ``x[order[r] // slots]``; None: row r is ``x[r]``.
        to, came: (n,) and (m,) int32, of `expert_places`: there and back, or back and there. The sizes are the same on
            all ranks.

    Returns:
        (m, D), contiguous, zeros where ``came`` is -1. No gradient.
    """
    ops, where = torch.ops.stepgraph, (group.size(), group.group_name)
    return ops.rows_end(ops.rows_begin(x, order, slots, to, came, *where), x, came, *where)

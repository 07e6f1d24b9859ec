"""Exchanges of one tensor per rank within a group, concurrent with computation.

    ranks = current().begin(group, like)
    ranks.send(peer, part)      # as many elements as like, of its dtype, which are left unchanged until the end
    ...                         # compute
    theirs = ranks.take(peer)   # waits for it; to be read until the end
    ranks.finish()

On CUDA a rank writes its part into the other's memory, by the copy engine of its GPU (torch's symmetric memory over
NVLink, without multicast), on a second stream. Flags follow the same way, since a kernel that sets one
would wait until a matrix product leaves it a processor. On a CPU parts go point to point over the group, gloo's.
In a CUDA graph sends are a branch parallel to the kernels that wait for others': that the branches run in parallel
is what CUDA does, and torch's pipelines rely on too, not what it promises.

Memory, flags and what is under way belong to a `Session`, which a captured step owns and enters to run.
"""

import functools
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat

Tensor = torch.Tensor
#: A name and a number.
Place = tuple[str, int]
_Key = tuple[str, Place | None]

#: Channels of symmetric memory's signals: the part of a rank has come, one for each turn; where it goes is free again;
#: a step begins.
COME, FREE, STEP = (0, 1), 2, 3


def operator(schema: str, fake: Callable, *kinds: str) -> Callable[[Callable], Callable]:
    """Define the operator of ``schema`` under ``torch.ops.stepgraph``. The decorated function runs it, on a CPU and on
    a GPU unless ``kinds`` names other keys of the dispatcher; ``fake`` is its fake implementation."""
    name, _, rest = schema.partition("(")

    def define(function: Callable) -> Callable:
        torch.library.define(f"stepgraph::{name}", f"({rest}")
        torch.library.impl(f"stepgraph::{name}", kinds or ("cpu", "cuda"), function)
        torch.library.register_fake(f"stepgraph::{name}", fake)
        return function

    return define


class Ranks(ABC):
    """The ranks of a group, of which this one sends and takes parts."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor):
        self.rank, self.group, self.like = group.rank(), group, like
        self.others = [(self.rank + step) % group.size() for step in range(1, group.size())]
        """The other ranks, those first whose parts are to be taken first: each begins with another one."""

    @abstractmethod
    def send(self, peer: int, *pieces: Tensor) -> None:
        """Begin to hand ``pieces``, each contiguous, one after the other to ``peer``."""

    @abstractmethod
    def take(self, peer: int) -> Tensor:
        """Wait for the tensor that ``peer`` sends, and return it."""

    @abstractmethod
    def copy(self, to: Tensor, part: Tensor) -> None:
        """Copy on the second stream; complete when the exchange ends."""

    @abstractmethod
    def join(self) -> None:
        """Make the current stream wait for the second one: a CUDA graph may not end before."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for transfers in flight, and release their buffers."""


class _PointToPoint(Ranks):
    """Over gloo: what will be taken is awaited from the beginning."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor):
        super().__init__(group, like)
        self.coming = {peer: torch.empty_like(like) for peer in self.others}
        self.awaited = {peer: dist.irecv(part, group=group, group_src=peer) for peer, part in self.coming.items()}
        self.sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, peer: int, *pieces: Tensor) -> None:
        part = torch.cat([piece.view(-1) for piece in pieces])
        self.sent.append((dist.isend(part, group=self.group, group_dst=peer), part))  # kept until it is sent

    def take(self, peer: int) -> Tensor:
        self.awaited.pop(peer).wait()
        return self.coming[peer]

    def copy(self, to: Tensor, part: Tensor) -> None:
        to.copy_(part)

    def join(self) -> None:
        pass  # there is no second stream

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()


#: Memory of all workspaces for as long as the process lasts: where a session ended, other ranks may still write.
_kept: list[Any] = []


class Workspace:
    """Memory on every rank with a place for the part of each other, and flags; all of it reachable by all.

    With two ``turns`` there are two buffers, for consecutive exchanges: a rank whose part of one was taken from
    has finished the previous one, so its memory is free: double-buffered, no acknowledgement needed. With one turn the
    reader acknowledges.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, turns: int):
        self.nbytes, self.ranks, self.turns, self.turn = nbytes, group.size(), turns, 0
        held, self.memory = compat.symmetric_memory(turns * (self.ranks - 1) * nbytes, group.group_name, device)
        _kept.append((held, self.memory))
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.one = torch.ones(1, dtype=torch.int32, device=device)
        for peer in range(self.ranks):
            self.flag(group.rank(), FREE, peer).fill_(1)

    @functools.cached_property
    def addresses(self) -> Tensor:
        """(2, ranks) int64, on the device: where the memory of each rank begins, and where its flags do."""
        found = [self.memory.get_buffer(rank, (1,), torch.uint8, 0) for rank in range(self.ranks)]
        found += [self.flag(rank, 0, 0) for rank in range(self.ranks)]
        # One by one on the device: a copy of a list would wait for the GPU.
        return torch.stack([self.one.new_full((), t.data_ptr(), dtype=torch.int64) for t in found]).view(2, -1)

    def take_turn(self) -> int:
        turn, self.turn = self.turn, (self.turn + 1) % self.turns
        return turn

    def place(self, turn: int, holder: int, sender: int, like: Tensor) -> Tensor:
        """Where ``holder`` gets the part of ``sender``."""
        start = (turn * (self.ranks - 1) + (sender - holder - 1) % self.ranks) * self.nbytes
        return self.memory.get_buffer(holder, like.shape, like.dtype, start // like.element_size())

    def flag(self, holder: int, channel: int, sender: int) -> Tensor:
        """The flag that ``sender`` sets for ``holder``."""
        return self.memory.get_signal_pad(holder, (1,), torch.int32, channel * self.ranks + sender)


class _Symmetric(Ranks):
    """Over symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor, workspace: Workspace, place: Place | None):
        super().__init__(group, like)
        self.workspace = workspace
        self.turn, self.answers = self.workspace.take_turn(), place is not None
        self.side = self.workspace.stream
        self.sent: list[Tensor] = []  # kept until it is sent
        self.side_stream_busy = False

    def send(self, peer: int, *pieces: Tensor) -> None:
        place = self.workspace.place(self.turn, peer, self.rank, self.like).view(-1)
        if self.answers:
            self.workspace.memory.wait_signal(peer, FREE)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for to, piece in zip(place.split([piece.numel() for piece in pieces]), pieces, strict=True):
                to.copy_(piece.view(-1))
            self.workspace.flag(peer, COME[self.turn], self.rank).copy_(self.workspace.one)
        self.sent += pieces
        self.side_stream_busy = True

    def take(self, peer: int) -> Tensor:
        self.workspace.memory.wait_signal(peer, COME[self.turn])
        return self.workspace.place(self.turn, self.rank, peer, self.like)

    def copy(self, to: Tensor, part: Tensor) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            to.copy_(part)
        self.side_stream_busy = True

    def join(self) -> None:
        if self.side_stream_busy:
            torch.cuda.current_stream().wait_stream(self.side)
        self.side_stream_busy = False

    def finish(self) -> None:
        self.join()
        if self.answers:
            for peer in self.others:
                self.workspace.memory.put_signal(peer, FREE)


class Session:
    """The exchanges of one captured step: symmetric memory by group and place, and what is under way.

    Entered while the step runs; its operators use the session that was entered last.
    """

    def __init__(self) -> None:
        self.count = 0
        """How many exchanges have begun."""
        self.workspaces: dict[_Key, Workspace] = {}
        self.outgrown: list[tuple[_Key, Workspace]] = []
        """Workspaces replaced by larger ones: CUDA graphs that recorded them still use them."""
        self.broken: list[Any] = []
        """Those of steps that were broken off, in which others may still write, and what is on its way to others'."""
        self.under_way: dict[tuple[str, str], list[Any]] = defaultdict(list)
        """Collectives under way, by kind and group, the oldest first: see `copy_collectives`."""
        self.sends: list[tuple[dist.Work, Tensor]] = []
        """What is being sent to other stages, kept until it has left: see `stage_sends`."""
        self.mail: dict[str, Any] = {}
        """What is written into other stages' memory, by group: see `stage_sends`."""
        self.host_memory: dict[torch.device, Any] = {}
        """What results are copied to while they are not needed, by device: see `kernels.offload`."""
        self._ages: Counter[str] = Counter()

    def __enter__(self) -> "Session":
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.remove(self)

    def begin(self, group: dist.ProcessGroup, like: Tensor, place: Place | None = None) -> Ranks:
        """Exchange tensors like ``like``. All ranks of ``group`` begin, and finish, in the same order.

        Exchanges that are under way while others begin have a ``place``, which no other has at the same time. Those
        without one follow each other.
        """
        self.count += 1
        if not like.is_cuda:
            return _PointToPoint(group, like)
        return _Symmetric(group, like, self.workspace(group, -(-like.nbytes // 16) * 16, like.device, place), place)

    def shared(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, place: Place) -> Workspace:
        """Memory of ``nbytes`` on every rank, at a ``place``, which all write together."""
        part = -(-nbytes // (group.size() - 1))
        return self.workspace(group, -(-part // 16) * 16, device, place)

    def fence(self, groups: Collection[str]) -> None:
        """Where a call begins, on all ranks of the ``groups`` that it exchanges in: exchanges without a place count
        their turns from here, so that a CUDA graph that recorded them may run again and again."""
        for (name, _), workspace in (*self.workspaces.items(), *self.outgrown):
            if name in groups and workspace.turns > 1:
                workspace.turn = 0
                workspace.memory.barrier(STEP)

    def forget(self, groups: Collection[str]) -> None:
        """Begin with new memory in ``groups``, on all their ranks: after a step that was broken off, flags are not what
        they should be, and what is under way would be taken for what the next step begins."""
        self._ages.update(groups)
        for memory in self.host_memory.values():
            memory.forget()
        for kind, name in list(self.under_way):
            if name in groups:
                del self.under_way[kind, name]
        self.broken += [self.mail.pop(name) for name in list(self.mail) if name in groups]
        self.broken += [w for (name, _), w in (*self.workspaces.items(), *self.outgrown) if name in groups]
        self.workspaces = {key: w for key, w in self.workspaces.items() if key[0] not in groups}
        self.outgrown = [(key, w) for key, w in self.outgrown if key[0] not in groups]

    def age(self, groups: Collection[str]) -> int:
        """How often memory of ``groups`` was forgotten: what recorded it at another age must not run again."""
        return sum(self._ages[group] for group in groups)

    def workspace(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, place: Place | None) -> Workspace:
        """The memory for parts of ``nbytes`` at ``place``, made or made larger where it must be."""
        key = (group.group_name, place)
        held = self.workspaces.get(key)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self.outgrown.append((key, held))
            if place is not None:  # an error of one number of a name will be an error of the others
                named = [
                    w.nbytes for (name, p), w in self.workspaces.items() if p and (name, p[0]) == (key[0], place[0])
                ]
                nbytes = max(nbytes, *named, 0)
            held = self.workspaces[key] = Workspace(group, nbytes, device, 2 if place is None else 1)
        return held


#: Sessions that were entered; the first is that of operators called outside any captured step.
_entered = [Session()]


def current() -> Session:
    """The session that was entered last."""
    return _entered[-1]

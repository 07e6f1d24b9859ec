"""How the ranks of a group hand each other one tensor each while they compute.

    ranks = begin(group, like)
    ranks.send(peer, part)      # as many elements as like, of its dtype, which stay as they are until the end
    ...                         # compute
    theirs = ranks.take(peer)   # waits for it; to be read until the end
    ranks.finish()

On CUDA a rank writes its part into the other's memory, by the copy engine of its GPU (torch's symmetric memory over
NVLink, without multicast), on a stream beside the current one. Flags follow the same way, since a kernel that sets one
would wait until a matrix product leaves it a processor. On a CPU parts go point to point over the group, gloo's.
In a CUDA graph sends are a branch beside the kernels that wait for others': that the branches do run beside each other
is what CUDA does, and torch's pipelines rely on too, not what it promises.
"""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from stepgraph import compat

Tensor = torch.Tensor

#: Channels of symmetric memory's signals: the part of a rank has come; where it goes is free again.
_COME, _FREE = 0, 1


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
        """What ``peer`` sends, once it is there."""

    @abstractmethod
    def copy(self, to: Tensor, part: Tensor) -> None:
        """Copy beside what is computed; there when the exchange ends."""

    @abstractmethod
    def join(self) -> None:
        """Let the current stream wait for all that runs beside it: a CUDA graph may not end before."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for what is still under way, and let go what was taken."""


def begin(group: dist.ProcessGroup, like: Tensor, place: tuple[str, int] = ("", 0)) -> Ranks:
    """Exchange tensors like ``like``. All ranks of ``group`` begin, and finish, in the same order; exchanges that are
    under way at the same time have different ``place``s, a name and a number."""
    return _Symmetric(group, like, place) if like.is_cuda else _PointToPoint(group, like)


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
        pass  # nothing runs beside

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()


class _Workspace:
    """Memory on every rank with a place for the part of each other, and flags; all of it within reach of all."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device):
        self.nbytes, self.ranks = nbytes, group.size()
        self.held, self.memory = compat.symmetric_memory((self.ranks - 1) * nbytes, group.group_name, device)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.one = torch.ones(1, dtype=torch.int32, device=device)
        for peer in range(self.ranks):
            self.flag(group.rank(), _FREE, peer).fill_(1)

    def place(self, holder: int, sender: int, like: Tensor) -> Tensor:
        """Where ``holder`` gets the part of ``sender``."""
        start = (sender - holder - 1) % self.ranks * self.nbytes
        return self.memory.get_buffer(holder, like.shape, like.dtype, start // like.element_size())

    def flag(self, holder: int, channel: int, sender: int) -> Tensor:
        """The flag by which ``sender`` tells ``holder`` something."""
        return self.memory.get_signal_pad(holder, (1,), torch.int32, channel * self.ranks + sender)


#: By group, and name and number of the place.
_workspaces: dict[tuple[str, str, int], _Workspace] = {}
#: Those that are no longer used but by CUDA graphs that may have been recorded with them.
_former: list[_Workspace] = []


def _workspace(group: dist.ProcessGroup, nbytes: int, device: torch.device, place: tuple[str, int]) -> _Workspace:
    key = (group.group_name, *place)
    held = _workspaces.get(key)
    if held is None or held.nbytes < nbytes:
        if held is not None:
            _former.append(held)
        # What comes to one number of a name will come to the others.
        largest = max((w.nbytes for other, w in _workspaces.items() if other[:2] == key[:2]), default=0)
        held = _workspaces[key] = _Workspace(group, max(nbytes, largest), device)
    return held


def forget() -> None:
    """Begin with new memory, on all ranks: after a step that was broken off, flags are not what they should be."""
    _former.extend(_workspaces.values())
    _workspaces.clear()


class _Symmetric(Ranks):
    """Over symmetric memory. A rank may write where its last part was taken: the taker says so when it is done."""

    def __init__(self, group: dist.ProcessGroup, like: Tensor, place: tuple[str, int]):
        super().__init__(group, like)
        self.workspace = _workspace(group, -(-like.nbytes // 16) * 16, like.device, place)
        self.side = self.workspace.stream
        self.sent: list[Tensor] = []  # kept until it is sent
        self.beside = False

    def send(self, peer: int, *pieces: Tensor) -> None:
        place = self.workspace.place(peer, self.rank, self.like).view(-1)
        self.workspace.memory.wait_signal(peer, _FREE)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for to, piece in zip(place.split([piece.numel() for piece in pieces]), pieces, strict=True):
                to.copy_(piece.view(-1))
            self.workspace.flag(peer, _COME, self.rank).copy_(self.workspace.one)
        self.sent += pieces
        self.beside = True

    def take(self, peer: int) -> Tensor:
        self.workspace.memory.wait_signal(peer, _COME)
        return self.workspace.place(self.rank, peer, self.like)

    def copy(self, to: Tensor, part: Tensor) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            to.copy_(part)
        self.beside = True

    def join(self) -> None:
        if self.beside:
            torch.cuda.current_stream().wait_stream(self.side)
        self.beside = False

    def finish(self) -> None:
        self.join()
        for peer in self.others:
            self.workspace.memory.put_signal(peer, _FREE)

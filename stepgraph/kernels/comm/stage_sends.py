"""Messages between the stages of a pipeline, as operators that return at once.

    send(x, peer, box, group_name)                               x travels to the rank at place ``peer`` of the group
    recv(size, stride, dtype, device, peer, box, group_name)     what that rank sends, a new tensor

Memory travels as it lies: dense tensors, in the strides that both ends know. Without a ``box`` messages go point to
point: those from one rank to another in one group arrive in the order in which they are sent. ``wait_tensor`` waits for
a receive; a sent tensor is kept until it has left (see `sent`).

With a ``box`` they go over symmetric memory, which never needs the host, and a receive needs no ``wait_tensor``. Each
receiver has a box for each kind of message from each other rank: places that messages take in turn, counted from where
a step begins. ``box`` is (the number of its first place, how many it has, how many all boxes of a rank have, the bytes
of a place), the same at both ends.

On CUDA the sender waits until the place is free, and its copy engine writes the message and a flag on a stream next to
the current one. The receiver's stream waits for that flag where the message is read, copies it out, and says that the
place is free: no result lies in memory that a later message overwrites. After a step all flags are as before it, so a
CUDA graph that recorded one may run again and again.

No schedule can end in a deadlock. A receive waits for one send only, as over NCCL. A send waits until a former
message has left its place, and a box has enough places (see `places_of` in `stepgraph.parallel.pipeline.messages`)
that the sender knows this already by a message that it got since: the wait adds no new reason to wait within a step.
For the first messages of a step it is for the receives of the step before, which wait for nothing of this one.

On a CPU messages go point to point over the group, gloo's, tagged with their box.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.kernels.comm.exchange import STEP, Session, Workspace, current, operator

Tensor = torch.Tensor


def _writes(device: torch.device) -> bool:
    """Whether ranks write into each other's memory, or send messages."""
    return device.type == "cuda"


class Mail:
    """The messages of one group in a session: where they lie, and which came last."""

    def __init__(self, workspace: Workspace, rank: int):
        self.workspace, self.memory, self.rank = workspace, workspace.memory, rank
        self.channels = self.memory.signal_pad_size // (4 * workspace.ranks)
        self.kept: Tensor | None = None
        # Half of the flags that no exchange uses, from the end, say that a place is free.
        flags = (self.channels - STEP - 1) // 2 * workspace.ranks
        self.memory.get_signal_pad(rank, (flags,), torch.int32, self.channels * workspace.ranks - flags).fill_(1)
        self.begin()

    def begin(self) -> None:
        """A step begins: messages are counted from here."""
        self._turns: Counter[tuple[str, int, int]] = Counter()

    def check(self, places: int) -> None:
        """``ValueError`` unless there are flags for ``places`` places of a rank."""
        if places > (most := (self.channels - STEP - 1) // 2):
            raise ValueError(
                f"stage_sends=symmetric: the messages that a rank receives need {places} places and there are flags "
                f"for {most}: use pp fewer ranks, or use point-to-point"
            )

    def _place(self, way: str, peer: int, box: Sequence[int]) -> int:
        """The place of the next message that goes one ``way``, to or from ``peer``."""
        first, places, *_ = box
        turn = self._turns[way, peer, first]
        self._turns[way, peer, first] += 1
        return first + turn % places

    def _memory(self, holder: int, place: int, nbytes: int, like: Tensor) -> Tensor:
        return self.memory.get_buffer(holder, like.shape, like.dtype, place * nbytes // like.element_size())

    def put(self, flat: Tensor, peer: int, box: Sequence[int]) -> None:
        """Send ``flat`` (n,) to ``peer``, concurrently with later work of the current stream."""
        place, side = self._place("to", peer, box), self.workspace.stream
        self.join()  # the former message, sent a computation ago, has left by now: its memory is free
        self.memory.wait_signal(peer, self.channels - 1 - place)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._memory(peer, place, box[3], flat).copy_(flat)
            self.workspace.flag(peer, STEP + 1 + place, self.rank).copy_(self.workspace.one)
        self.kept = flat

    def take(self, flat: Tensor, peer: int, box: Sequence[int]) -> None:
        """Wait for the next message of ``peer`` in the box, and copy it into ``flat`` (n,)."""
        place = self._place("from", peer, box)
        self.memory.wait_signal(peer, STEP + 1 + place)
        flat.copy_(self._memory(self.rank, place, box[3], flat))
        self.memory.put_signal(peer, self.channels - 1 - place)

    def join(self) -> None:
        """Let the current stream wait until all that was put has left."""
        if self.kept is not None:
            torch.cuda.current_stream().wait_stream(self.workspace.stream)
        self.kept = None


def open_boxes(session: Session, group_name: str, places: int, nbytes: int, device: torch.device) -> None:
    """Where a step begins, on all ranks of the group at the same time: memory for ``places`` places of ``nbytes`` on
    each rank, made where it does not exist yet.

    Raises ``ValueError`` for more places than there are flags for, and ``RuntimeError`` if a rank cannot reach
    another's memory.
    """
    if not _writes(device):
        return
    group = compat.process_group(group_name)
    workspace = session.shared(group, places * nbytes, device, ("stages", 0))
    mail = session.mail.get(group.group_name)
    if mail is None or mail.workspace is not workspace:
        mail = session.mail[group.group_name] = Mail(workspace, group.rank())
    mail.check(places)
    mail.begin()


def _flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


@operator("send(Tensor x, int peer, int[]? box, str group_name) -> Tensor", lambda x, *_: x.new_empty(0))
def _send(x: Tensor, peer: int, box: list[int] | None, group_name: str) -> Tensor:
    group, session, flat = compat.process_group(group_name), current(), _flat(x)
    if box is not None and _writes(x.device):
        session.mail[group.group_name].put(flat, peer, box)
        return x.new_empty(0)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # events of a recording cannot be queried
        session.sends = [(work, kept) for work, kept in session.sends if not work.is_completed()]
    session.sends.append((dist.isend(flat, group=group, group_dst=peer, tag=box[0] if box else 0), flat))
    return x.new_empty(0)


@operator(
    "recv(int[] size, int[] stride, ScalarType dtype, Device device, int peer, int[]? box, str group_name) -> Tensor",
    lambda size, stride, dtype, device, *_: torch.empty_strided(size, stride, dtype=dtype, device=device),
    "CompositeExplicitAutograd",
)
def _recv(
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
    peer: int,
    box: list[int] | None,
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    flat = _flat(made)
    if box is None:
        compat.register_work(made, dist.irecv(flat, group=group, group_src=peer))
    elif _writes(device):
        current().mail[group.group_name].take(flat, peer, box)
    else:
        dist.recv(flat, group=group, group_src=peer, tag=box[0])
    return made


def sent(session: Session) -> None:
    """Wait until all that was sent has left; on a GPU the current stream waits, not the host."""
    for work, _ in session.sends:
        work.wait()
    session.sends = []
    for mail in session.mail.values():
        mail.join()

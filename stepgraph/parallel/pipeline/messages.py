"""The messages between the ranks of a pipeline: when each rank posts them, and the check that they complete.

A computation's message is sent right after it. Its receive is posted before the next computation that begins when the
message has been sent: earlier, it would hold processors of the GPU while it waits for the sender; later, the sender
would. `on_paper` finds that moment from the schedule.

An order of messages is right only if it ends under these rules, NCCL's without buffers:

- A send ends only after its receive is posted, and a receive only after its send.
- The messages that one rank sends to another have a communicator of their own, which runs them in order.
- A rank posts messages and does not wait, except for the first one on a communicator, which is made then by both ranks.
- A computation waits until all messages that its rank posted before have ended. It may read one of them, and any
  computation may wait for the whole GPU: a kernel is tuned or loaded, memory is returned, a CUDA graph is recorded.

The order above does by construction: a computation waits only for messages of computations that began before it did on
paper. The check does not rely on that.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from stepgraph.graph.step_graph import Call
from stepgraph.parallel.pipeline.schedules import target_of
from stepgraph.parallel.pipeline.timeline import on_paper


class Channel(NamedTuple):
    """Messages of one kind from one rank of a pipeline to another, in order."""

    forward: bool
    sender: int
    receiver: int


class Message(NamedTuple):
    """One call that sends or receives. ``stage``: the one that reads the message."""

    channel: Channel
    sends: bool
    stage: int

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.channel.receiver if self.sends else self.channel.sender


def message_of(call: Call, ranks_of: Sequence[int]) -> Message | None:
    """What ``call`` sends or receives; None where it computes. ``ranks_of``: of each stage."""
    kind, here = call.kind, call.stage
    if not (kind.sends or kind.receives):
        return None
    forward, sends = kind.forward, kind.sends
    there = here + (1 if forward == sends else -1)
    ranks = (ranks_of[here], ranks_of[there]) if sends else (ranks_of[there], ranks_of[here])
    return Message(Channel(forward, *ranks), sends, there if sends else here)


def calls_of(orders: Sequence[Sequence[Call]], ranks_of: Sequence[int], symmetric: bool = False) -> list[list[Call]]:
    """For each rank of the pipeline its calls, sends and receives among them. ``orders``: see `work_of`. ``ranks_of``:
    of each stage. ``symmetric``: messages over symmetric memory, which need no receive to travel: each is received
    right before the computation that reads it.

    Stage 2 sends forward to stage 3, and receives forward from stage 1.

    Raises ``ValueError``, in one line, where the ranks wait for each other.
    """
    stages = len(ranks_of)
    spans = {span.work: span for span in on_paper(orders, ranks_of).spans}
    arriving: dict[Channel, list[tuple[float, float, Call]]] = defaultdict(list)
    for work, span in spans.items():
        target = target_of(work, stages)
        if target is not None and ranks_of[target] != span.rank:
            channel = Channel(work.kind.forward, span.rank, ranks_of[target])
            receive = Call(work.kind.receive, target, work.microbatch)
            due = spans[work._replace(stage=target)].start if symmetric else span.end
            arriving[channel].append((due, span.end, receive))
    receives: list[list[tuple[float, float, Call]]] = [[] for _ in orders]
    for channel, messages in arriving.items():
        due = math.inf
        for when, sent, receive in reversed(messages):  # none after a later one of its channel
            due = min(due, when)
            receives[channel.receiver].append((due, sent, receive))
    calls = []
    for order, waiting in zip(orders, receives, strict=True):
        queue, found = deque(sorted(waiting, key=lambda message: message[:2])), []
        for work in order:
            while queue and queue[0][0] <= spans[work].start:
                found.append(queue.popleft()[2])
            found.append(work)
            target = target_of(work, stages)
            if target is not None and ranks_of[target] != ranks_of[work.stage]:
                found.append(work._replace(kind=work.kind.send))
        calls.append(found)
    if not symmetric:
        check_messages(calls, ranks_of)
    return calls


class _Rank:
    """One rank on paper. ``at``: the number of its next call. ``posted``: on each communicator the messages that have
    not ended, the oldest first; ``pending``: how many these are. ``opens``: whether the latest one was the first on its
    communicator."""

    def __init__(self, calls: Sequence[Call]):
        self.calls, self.at, self.pending, self.opens = calls, 0, 0, False
        self.posted: dict[Hashable, deque[tuple[Call, Message]]] = defaultdict(deque)

    @property
    def now(self) -> str:
        """The call that the rank waits in."""
        return str(self.calls[self.at]) if self.at < len(self.calls) else "the end of the step"


def check_messages(
    calls: Sequence[Sequence[Call]],
    ranks_of: Sequence[int],
    communicator: Callable[[Channel], Hashable] = lambda channel: channel[1:],
) -> None:
    """``ValueError``, in one line with the ranks that wait for each other, unless the messages of a step complete by
    the rules above.

    ``calls``: of every rank of the pipeline, in order. ``ranks_of``: of each stage. ``communicator``: the one that
    carries a channel; by default one for each sender and receiver.
    """
    ranks, ready = [_Rank(own) for own in calls], list(range(len(calls)))
    while ready:
        number = ready.pop()
        rank = ranks[number]
        while rank.at < len(rank.calls):
            call = rank.calls[rank.at]
            message = message_of(call, ranks_of)
            if rank.pending and (message is None or rank.opens):
                break
            rank.at += 1
            if message is not None:
                on = communicator(message.channel)
                rank.opens = on not in rank.posted
                rank.posted[on].append((call, message))
                rank.pending += 1
                ready += _deliver(ranks, number, message.peer, on)
    if any(rank.pending or rank.at < len(rank.calls) for rank in ranks):
        raise ValueError(f"the pipeline's messages never complete: {_cycle(ranks)}; change the order of its calls")


def _deliver(ranks: list[_Rank], one: int, other: int, on: Hashable) -> set[int]:
    """End what both ranks have reached on the communicator ``on``; the ranks that no longer wait."""
    mine, theirs = ranks[one].posted[on], ranks[other].posted[on]
    while mine and theirs:
        (call, message), (their_call, their_message) = mine[0], theirs[0]
        if (message.peer, their_message.peer) != (other, one) or message.sends == their_message.sends:
            break
        if (message.channel, message.stage, call.microbatch) != (*their_message[::2], their_call.microbatch):
            raise ValueError(
                f"the pipeline's messages cross: {call} on rank {one} of the pipeline meets {their_call} on rank "
                f"{other}; let each rank receive in the order in which the other sends"
            )
        for rank, queue in ((one, mine), (other, theirs)):
            queue.popleft()
            ranks[rank].pending -= 1
    return {rank for rank in (one, other) if not ranks[rank].pending}


def _cycle(ranks: list[_Rank]) -> str:
    """The ranks that wait for each other, each with the call that it waits in and whom for; or a rank that waits for
    one that has ended."""
    number, on = next((i, on) for i, rank in enumerate(ranks) for on, queue in rank.posted.items() if queue)
    lines: dict[int, str] = {}
    while number not in lines and ranks[number].pending:
        posted = ranks[number].posted
        if not posted[on]:  # it has not reached the message: it waits for an earlier one
            on = next(on for on, queue in posted.items() if queue)
        call, message = posted[on][0]
        lines[number] = f"rank {number} waits in {ranks[number].now} until rank {message.peer} meets its {call}"
        number = message.peer
    found = list(lines.values())
    return "; ".join(found[list(lines).index(number) :] if number in lines else [*found, f"rank {number} has ended"])


def places_of(calls: Sequence[Sequence[Call]], ranks_of: Sequence[int]) -> dict[Channel, int]:
    """The places that each channel needs where stages write into each other's memory: see `stage_sends`. ``calls``:
    of each rank of the pipeline, see `calls_of`, where a receive ends when it is called.

    A receiver has a box for each kind of message from each other rank, and its places are used in rotation. A box has
    the fewest places with which no send ever waits within a step: when a message is sent, the sender has already
    received something that was sent after the receiver had read what lay in that place. Those are as many as there are
    ranks where each has one stage, and fewer than twice as many where each has two, however many microbatches there
    are.

    Ranks run on paper. Each knows how many messages of every channel were received for certain: its own, and what the
    sender of a message knew when it sent it.
    """
    queues = [[m for call in own if (m := message_of(call, ranks_of))] for own in calls]
    knows: list[dict[Channel, int]] = [defaultdict(int) for _ in queues]
    sent: dict[Channel, list[dict[Channel, int]]] = defaultdict(list)
    at, needed = [0] * len(queues), defaultdict(int)
    while any(place < len(queue) for place, queue in zip(at, queues, strict=True)):
        before = list(at)
        for rank, queue in enumerate(queues):
            known = knows[rank]
            while at[rank] < len(queue):
                channel, sends, _ = queue[at[rank]]
                if sends:
                    sent[channel].append(dict(known))
                    needed[channel] = max(needed[channel], len(sent[channel]) - known[channel])
                elif known[channel] == len(sent[channel]):
                    break
                else:
                    for other, count in sent[channel][known[channel]].items():
                        known[other] = max(known[other], count)
                    known[channel] += 1
                at[rank] += 1
        if at == before:
            raise ValueError(f"the schedule never ends: its ranks wait for each other's messages at {at}")
    return dict(needed)

"""How much memory the messages of a pipeline need where stages write into each other's: see `symmetric_sends`.

A receiver has a box for each kind of message from each other rank, and its places are taken in turn. A box has the
fewest places with which no send ever waits within a step: when a message is sent, the sender has already received
something that was sent after the receiver had read what lay in that place. Those are as many as there are ranks where
each has one stage, and fewer than twice as many where each has two, however many microbatches there are.
"""

from collections import defaultdict
from collections.abc import Sequence

from stepgraph.graph.step_graph import Call
from stepgraph.parallel.pipeline.messages import Channel, message_of


def places_of(calls: Sequence[Sequence[Call]], ranks_of: Sequence[int]) -> dict[Channel, int]:
    """The places that each channel needs. ``calls``: of each rank of the pipeline, see `calls_of`, where a receive ends
    when it is called.

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

"""Orders of messages that only buffers of a transport save, as counterexamples."""

from stepgraph.parallel.pipeline.messages import calls_of, message_of
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of


def ranks_of(name, ranks):
    """The rank of each stage."""
    schedule = SCHEDULES[name]
    return [rank_of(schedule, ranks, stage) for stage in range(ranks * schedule.chunks)]


def begun_early(orders, where):
    """Each receive is posted one computation before the one that reads it, as stepgraph did at first."""
    early = []
    for own in calls_of(orders, where, symmetric=True):  # where a receive stands right before its computation
        groups, received = [], []
        for call in own:
            message = message_of(call, where)
            if message is not None and not message.sends:
                received.append(call)
            elif message is not None:
                groups[-1].append(call)
            else:
                groups.append([*received, call])
                received = []
        reads = [[c for c in group if c.kind.receives] for group in groups]
        rests = [group[len(read) :] for group, read in zip(groups, reads, strict=True)]
        moved = [reads[0] + reads[1], *reads[2:], []]
        early.append([call for read, rest in zip(moved, rests, strict=True) for call in (*read, *rest)])
    return early


def one_way_for_both(channel):
    """One communicator for the messages of two ranks in both directions."""
    return frozenset(channel[1:])

"""The schedules of a pipeline: which rank has which stages, and the calls of its step.

The order of forward and backward is that of `torch.distributed.pipelining`; sends and receives are placed here. What a
call makes for a neighbour is sent right behind it. Receives are begun in the order in which the neighbour sends, one
computation before the one that reads them, so that they travel beside it. Messages over symmetric memory need no
receive to travel: there it ends right before the computation that reads it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from stepgraph import compat
from stepgraph.errors import unknown_name
from stepgraph.graph.program import Call

#: (kind, stage, microbatch) of a computation; kind as in `compat.pipeline_order`, or as in `with_once`, for which the
#: microbatch is None.
Work = tuple[str, int, int | None]


@dataclass(frozen=True)
class Schedule:
    """A schedule. ``torch``: torch's class. ``chunks``: stages of a rank. ``v``: whether they are at both ends of the
    pipeline (rank 0 has the first and the last), else the second is a round after the first. ``halves``: whether
    backward is two calls. ``fewest``: microbatches for each rank of the pipeline."""

    torch: str
    chunks: int = 1
    v: bool = False
    halves: bool = False
    fewest: int = 1


SCHEDULES = {
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", chunks=2),
    "zero-bubble": Schedule("ScheduleInterleavedZeroBubble", halves=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", chunks=2, v=True, halves=True),
    "dualpipev": Schedule("ScheduleDualPipeV", chunks=2, v=True, halves=True, fewest=2),
}


def schedule_named(name: str) -> Schedule:
    """The schedule ``name``; ``ValueError`` with the nearest name where there is none."""
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def rank_of(schedule: Schedule, ranks: int, stage: int) -> int:
    """The rank of the pipeline that has ``stage``."""
    last = ranks * schedule.chunks - 1
    return min(stage, last - stage) if schedule.v else stage % ranks


def check_schedule(name: str, ranks: int, microbatches: int) -> None:
    """``ValueError``, in one line, unless the schedule ``name`` runs so many microbatches on so many ranks."""
    schedule = schedule_named(name)
    fewest = ranks * schedule.fewest
    if microbatches < fewest:
        raise ValueError(
            f"accumulate={microbatches} is too small for the schedule {name} on pp={ranks}, which needs at least "
            f"{fewest} microbatches: try --accumulate {fewest}"
        )
    rounds = microbatches // ranks
    if name in ("interleaved", "zero-bubble") and microbatches % rounds:
        above = next(n for n in range(microbatches, 2 * microbatches + 1) if n % (n // ranks) == 0)
        raise ValueError(
            f"accumulate={microbatches} does not divide into rounds of the schedule {name} on pp={ranks}: "
            f"try --accumulate {above}"
        )


def work_of(name: str, ranks: int, microbatches: int) -> list[list[Work]]:
    """For each rank of the pipeline what it computes, in order."""
    check_schedule(name, ranks, microbatches)
    schedule = SCHEDULES[name]
    orders = compat.pipeline_order(
        schedule.torch, ranks, schedule.chunks, microbatches, single=schedule.torch == "Schedule1F1B"
    )
    return [[part for work in order for part in _parts(work, schedule.halves)] for order in orders]


def _parts(work: Work, halves: bool) -> list[Work]:
    kind, stage, microbatch = work
    if kind == "backward" and halves:
        return [("backward_input", stage, microbatch), ("backward_weight", stage, microbatch)]
    return [work]


def with_once(
    orders: Sequence[Sequence[Work]], gathered: Collection[int], reduced: Collection[int]
) -> list[list[Work]]:
    """``orders`` (see `work_of`) with ``gather`` before the first forward of the stages ``gathered``, and ``reduce``
    behind the last backward of those ``reduced``."""
    made = []
    for order in orders:
        first, last = {}, {}
        for i, (kind, stage, _) in enumerate(order):
            first.setdefault(stage, i) if kind == "forward" else last.update({stage: i})
        found: list[Work] = []
        for i, work in enumerate(order):
            stage = work[1]
            found += [("gather", stage, None)] if first[stage] == i and stage in gathered else []
            found.append(work)
            found += [("reduce", stage, None)] if last[stage] == i and stage in reduced else []
        made.append(found)
    return made


def source_of(work: Work, stages: int) -> int | None:
    """The stage whose message ``work`` waits for, if there is one."""
    kind, stage, _ = work
    source = {"forward": stage - 1, "backward": stage + 1, "backward_input": stage + 1}.get(kind, -1)
    return source if 0 <= source < stages else None


def target_of(work: Work, stages: int) -> int | None:
    """The stage that waits for what ``work`` makes, if there is one."""
    kind, stage, _ = work
    target = {"forward": stage + 1, "backward": stage - 1, "backward_input": stage - 1}.get(kind, -1)
    return target if 0 <= target < stages else None


def calls_of(orders: Sequence[Sequence[Work]], ranks_of: Sequence[int], rank: int, ahead: bool = True) -> list[Call]:
    """The calls of ``rank``, sends and receives among them. ``orders``: see `work_of`. ``ranks_of``: of each stage.
    ``ahead``: receives are begun one computation before the one that reads them; else they end right before it.

    Graphs are called ``forward.2``, ``send_forward.2`` (from stage 2 to 3), ``receive_forward.2`` (from 1 to 2).
    """
    stages = len(ranks_of)
    arriving: dict[tuple[bool, int], list[tuple[int, int]]] = defaultdict(list)
    for sender, order in enumerate(orders):
        for work in order:
            target = target_of(work, stages)
            if target is not None and ranks_of[target] == rank != sender:
                arriving[work[0] == "forward", sender].append((target, work[2]))
    begun: dict[tuple[bool, int], int] = defaultdict(int)

    def receives(work: Work) -> Iterator[Call]:
        source = source_of(work, stages)
        if source is None or ranks_of[source] == rank:
            return
        channel = work[0] == "forward", ranks_of[source]
        last = arriving[channel].index(work[1:])
        for stage, microbatch in arriving[channel][begun[channel] : last + 1]:
            yield Call(f"receive_{_direction(work)}.{stage}", microbatch)
        begun[channel] = max(begun[channel], last + 1)

    found: list[Call] = []
    read = [list(receives(work)) for work in orders[rank]]
    if ahead and len(read) > 1:
        read = [read[0] + read[1], *read[2:], []]
    for work, received in zip(orders[rank], read, strict=True):
        kind, stage, microbatch = work
        found += received
        found.append(Call(f"{kind}.{stage}", microbatch))
        target = target_of(work, stages)
        if target is not None and ranks_of[target] != rank:
            found.append(Call(f"send_{_direction(work)}.{stage}", microbatch))
    return found


def _direction(work: Work) -> str:
    return "forward" if work[0] == "forward" else "backward"

"""The schedules of a pipeline: which rank has which stages, and what it computes in a step.

The order of forward and backward is that of `torch.distributed.pipelining`; `messages` places sends and receives.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stepgraph import compat
from stepgraph.errors import unknown_name
from stepgraph.graph.step_graph import Call, Kind


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
    """``ValueError``, in one line, unless the schedule ``name`` runs this many microbatches on ``ranks`` ranks."""
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


def work_of(name: str, ranks: int, microbatches: int) -> list[list[Call]]:
    """For each rank of the pipeline what it computes, in order."""
    check_schedule(name, ranks, microbatches)
    schedule = SCHEDULES[name]
    orders = compat.pipeline_order(
        schedule.torch, ranks, schedule.chunks, microbatches, single=schedule.torch == "Schedule1F1B"
    )
    return [[part for work in order for part in _parts(*work, schedule.halves)] for order in orders]


def _parts(kind: str, stage: int, microbatch: int, halves: bool) -> list[Call]:
    halved = kind == Kind.BACKWARD and halves
    kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if halved else (Kind(kind),)
    return [Call(kind, stage, microbatch) for kind in kinds]


def with_once(
    orders: Sequence[Sequence[Call]], gathered: Collection[int], reduced: Collection[int]
) -> list[list[Call]]:
    """``orders`` (see `work_of`) with ``gather`` before the first forward of the stages ``gathered``, and ``reduce``
    after the last backward of the stages ``reduced``."""
    made = []
    for order in orders:
        first, last = {}, {}
        for i, (kind, stage, _) in enumerate(order):
            first.setdefault(stage, i) if kind is Kind.FORWARD else last.update({stage: i})
        found: list[Call] = []
        for i, work in enumerate(order):
            stage = work[1]
            found += [Call(Kind.GATHER, stage)] if first[stage] == i and stage in gathered else []
            found.append(work)
            found += [Call(Kind.REDUCE, stage)] if last[stage] == i and stage in reduced else []
        made.append(found)
    return made


def source_of(work: Call, stages: int) -> int | None:
    """The stage whose message ``work`` waits for, if there is one."""
    kind, stage, _ = work
    source = {Kind.FORWARD: stage - 1, Kind.BACKWARD: stage + 1, Kind.BACKWARD_INPUT: stage + 1}.get(kind, -1)
    return source if 0 <= source < stages else None


def target_of(work: Call, stages: int) -> int | None:
    """The stage that waits for the result of ``work``, if there is one."""
    kind, stage, _ = work
    target = {Kind.FORWARD: stage + 1, Kind.BACKWARD: stage - 1, Kind.BACKWARD_INPUT: stage - 1}.get(kind, -1)
    return target if 0 <= target < stages else None

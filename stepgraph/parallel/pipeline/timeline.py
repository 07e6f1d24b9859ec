"""A schedule on paper: when each rank of a pipeline computes, from the seconds of every stage's calls."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepgraph.graph.step_graph import Call, Kind
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of, source_of, work_of

_UNITS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
_UNITS |= {Kind.GATHER: 0.0, Kind.REDUCE: 0.0}


class Span(NamedTuple):
    """One computation of a rank. ``start``, ``end``: seconds since the step began."""

    rank: int
    work: Call
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTime:
    """The computations of all ranks; ``seconds`` until the last ends."""

    spans: list[Span]
    ranks: int

    @property
    def seconds(self) -> float:
        """Until the last computation ends."""
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> float:
        """Seconds that ``rank`` computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    @property
    def bubble(self) -> float:
        """The share of the time, in [0, 1], that ranks wait for other stages, on average."""
        return 1 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.seconds)

    def most_in_flight(self, stage: int) -> int:
        """Microbatches whose forward ``stage`` keeps values of, at most at one time."""
        return self.most_kept({stage: (1, 1)})

    def most_kept(self, sizes: Mapping[int, tuple[int, int]]) -> int:
        """What some stages keep for backward of all their microbatches, at most at one time.

        ``sizes``: of each stage, what it keeps for one microbatch from forward on, and, where backward has two halves,
        what it keeps between them.
        """
        events = []
        for span in self.spans:
            kind, stage, _ = span.work
            kept, between = sizes.get(stage, (0, 0))
            changes = {
                Kind.FORWARD: kept,
                Kind.BACKWARD: -kept,
                Kind.BACKWARD_INPUT: between - kept,
                Kind.BACKWARD_WEIGHT: -between,
            }
            change = changes.get(kind, 0)
            events.append((span.start if kind is Kind.FORWARD else span.end, change))
        return max(itertools.accumulate((change for _, change in sorted(events)), initial=0))


def simulate_schedule(
    orders: Sequence[Sequence[Call]],
    ranks_of: Sequence[int],
    seconds: Mapping[tuple[Kind, int], float],
    send_seconds: Mapping[tuple[bool, int], float],
) -> PipelineTime:
    """Run the computations of all ranks as early as their order and what they read allow.

    ``orders``: see `work_of`. ``ranks_of``: of each stage. ``seconds``: of each kind of call of each stage.
    ``send_seconds``: of each stage's message, forward (True) or backward: it overlaps with computation, and nothing of
    one rank delays another.
    """
    ended: dict[Call, float] = {}
    free, places, spans = [0.0] * len(orders), [0] * len(orders), []
    while len(spans) < sum(map(len, orders)):
        before = len(spans)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                work = order[places[rank]]
                ready = _ready(work, ended, ranks_of, send_seconds)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = ended[work] = start + seconds[work[0], work[1]]
                spans.append(Span(rank, work, start, free[rank]))
                places[rank] += 1
        if len(spans) == before:
            raise ValueError(f"the schedule never ends: its ranks wait for each other at {places}")
    return PipelineTime(spans, len(orders))


def _ready(
    work: Call, ended: Mapping[Call, float], ranks_of: Sequence[int], send_seconds: Mapping[tuple[bool, int], float]
) -> float | None:
    """When ``work``'s input from another stage has arrived; None if not known yet."""
    source = source_of(work, len(ranks_of))
    if source is None:
        return 0.0
    kind, stage, _ = work
    found = next((ended[maker] for maker in _makers(work, source) if maker in ended), None)
    if found is None or ranks_of[source] == ranks_of[stage]:
        return found
    return found + send_seconds[kind is Kind.FORWARD, source]


def _makers(work: Call, source: int) -> list[Call]:
    """What of the stage ``source`` may make what ``work`` reads of it."""
    kind, _, microbatch = work
    kinds = (Kind.FORWARD,) if kind is Kind.FORWARD else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    return [Call(made, source, microbatch) for made in kinds]


def aligned(measured: PipelineTime, ranks_of: Sequence[int]) -> PipelineTime:
    """``measured``, whose spans are in seconds since each rank's own begin of the step, on one clock: ranks begin
    together, except the ones that would then read a missing result. ``ranks_of``: of each stage."""
    spans = {span.work: span for span in measured.spans}
    gaps: dict[tuple[int, int], float] = {}
    for work, span in spans.items():
        source = source_of(work, len(ranks_of))
        for maker in _makers(work, source) if source is not None else ():
            if maker in spans and spans[maker].rank != span.rank:
                pair = spans[maker].rank, span.rank
                gaps[pair] = max(gaps.get(pair, -math.inf), spans[maker].end - span.start)
    begin = [0.0] * measured.ranks
    for _ in range(measured.ranks):  # as far as one rank's wait reaches
        for (earlier, later), gap in gaps.items():
            begin[later] = max(begin[later], begin[earlier] + gap)
    first = min(begin[span.rank] + span.start for span in measured.spans)
    moved = [(span, begin[span.rank] - first) for span in measured.spans]
    return PipelineTime([s._replace(start=s.start + by, end=s.end + by) for s, by in moved], measured.ranks)


def on_paper(orders: Sequence[Sequence[Call]], ranks_of: Sequence[int]) -> PipelineTime:
    """`simulate_schedule` where all calls of a kind take equally long, and backward twice as long as forward."""
    stages = range(len(ranks_of))
    seconds = {(kind, stage): time for kind, time in _UNITS.items() for stage in stages}
    return simulate_schedule(
        orders, ranks_of, seconds, {(way, stage): 0.0 for way in (True, False) for stage in stages}
    )


def most_in_flight(name: str, ranks: int, microbatches: int) -> int:
    """Microbatches whose forward a rank keeps values of at one time, summed over its stages, on the rank where that is
    most; see `on_paper`."""
    stages = ranks * SCHEDULES[name].chunks
    ranks_of = [rank_of(SCHEDULES[name], ranks, stage) for stage in range(stages)]
    timed = on_paper(work_of(name, ranks, microbatches), ranks_of)
    return max(
        sum(timed.most_in_flight(stage) for stage in range(stages) if ranks_of[stage] == rank) for rank in range(ranks)
    )

"""How long the ranks of a pipeline wait for each other: the bubble of a run's steps, and when each computed."""

import statistics

from stepgraph.parallel.pipeline.timeline import PipelineTime, Span, aligned
from stepgraph.parallel.ranks import Ranks
from stepgraph.step import CapturedStep


class Bubble:
    """Of the timed steps of a run. ``share``: of their time, in [0, 1], the mean of all ranks; ``last``: the
    computations of the last step, on the first data-parallel and tensor-parallel ranks. Both None until `measure`."""

    def __init__(self) -> None:
        self.share: float | None = None
        self.last: PipelineTime | None = None
        self._waited_s = self._steps_s = 0.0

    def add(self, waited_s: float, step_s: float) -> None:
        """A step took ``step_s`` seconds, of which this rank waited ``waited_s`` for other stages."""
        self._waited_s += waited_s
        self._steps_s += step_s

    def measure(self, ranks: Ranks, step: CapturedStep) -> str:
        """Ask all ranks for their share and for their computations; what to print, "" if no step was timed."""
        if not self._steps_s:
            return ""
        shares, spans = zip(*ranks.gather(lambda: (self._waited_s / self._steps_s, _spans(step))), strict=True)
        self.share = statistics.fmean(shares)
        beside = len(spans) // step.pipeline.ranks  # ranks that share a stage
        last = PipelineTime([span for own in spans[::beside] for span in own], step.pipeline.ranks)
        self.last = aligned(last, step.pipeline.ranks_of)  # ranks do not begin a step at one time
        return f"bubble {self.share:.1%} of the step on average, {max(shares):.1%} on the rank that waits longest"


def _spans(step: CapturedStep) -> list[Span]:
    return [Span(step.pipeline.rank, call, start, end) for call, start, end in step.spans]

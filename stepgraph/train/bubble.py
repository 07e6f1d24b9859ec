"""How long the ranks of a pipeline wait for each other: the bubble of a run's steps, and when each rank computed."""

from collections import deque

from stepgraph.graph.step_graph import Call
from stepgraph.parallel.pipeline.timeline import PipelineTime, Span, aligned
from stepgraph.parallel.ranks import Ranks
from stepgraph.run.spans import Spans
from stepgraph.step import CapturedStep

#: The latest timed steps, among which the median is chosen.
_KEPT = 20


class Bubble:
    """The bubble of a run, by the definition of a forecast: `PipelineTime.bubble` of what all ranks computed.

    ``measured``: the computations of the timed step with the median bubble among the latest, on the first data-parallel
    and tensor-parallel ranks; None until `measure`."""

    def __init__(self) -> None:
        self.measured: PipelineTime | None = None
        self._steps: deque[list[tuple[Call, float, float]]] = deque(maxlen=_KEPT)

    @property
    def share(self) -> float | None:
        return self.measured and self.measured.bubble

    def add(self, spans: Spans) -> None:
        """A timed step of this rank computed ``spans``."""
        self._steps.append(spans.seconds())

    def measure(self, ranks: Ranks, step: CapturedStep) -> str:
        """Choose the median step of all ranks; what to print, "" if no step was timed."""
        if not self._steps:
            return ""
        pipeline = step.pipeline
        gathered = ranks.gather(lambda: [[Span(pipeline.rank, *timed) for timed in spans] for spans in self._steps])
        replicas = len(gathered) // pipeline.ranks  # ranks that share a stage
        times = [
            PipelineTime([span for own in spans for span in own], pipeline.ranks)
            for spans in zip(*gathered[::replicas], strict=True)
        ]
        # Ranks do not begin a step at one time.
        times = sorted((aligned(time, pipeline.ranks_of) for time in times), key=lambda time: time.bubble)
        self.measured = time = times[len(times) // 2]
        longest = 1 - min(map(time.busy, range(time.ranks))) / time.seconds
        return f"bubble {time.bubble:.1%} of the schedule on average, {longest:.1%} on the rank that waits longest"

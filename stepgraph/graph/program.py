"""`StepProgram`: a training step as named graphs and a schedule of calls.

A plain step is one graph, called once. Accumulation is a schedule over two: the graph of one microbatch, called once
for each, and the graph of the update. A pipeline is a schedule over the graphs of a rank's stages, with sends and
receives among the calls. Values flow between calls in inputs that are an `Accumulator`, which graphs share and
write in place, and in each `Value` that one graph returns and others read in calls for the same microbatch. The results
of a call for no microbatch are read by the calls for every microbatch.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from stepgraph.graph.report import PassReport
from stepgraph.graph.step_graph import Call, Kind, StepGraph
from stepgraph.graph.values import Value

#: A value, and the microbatch that it is of (None: all of them).
ValueKey = tuple[Value, int | None]


@dataclass
class StepProgram:
    """``graphs``: by name, the first of them `main`. ``schedule``: the calls of one step, in order. ``log``: reports of
    passes that were applied before a pipeline's stages were cut into graphs."""

    graphs: dict[str, StepGraph]
    schedule: list[Call]
    log: list[PassReport] = field(default_factory=list)

    @classmethod
    def plain(cls, step: StepGraph) -> "StepProgram":
        """The program of one graph, called once on the whole batch."""
        return cls({"step": step}, [Call(Kind.STEP, microbatch=0)])

    @classmethod
    def accumulation(cls, microbatch: StepGraph, update: StepGraph, n: int) -> "StepProgram":
        """``microbatch`` called ``n`` times, then ``update``."""
        calls = [Call(Kind.MICROBATCH, microbatch=k) for k in range(n)]
        return cls({"microbatch": microbatch, "update": update}, [*calls, Call(Kind.UPDATE)])

    @property
    def main(self) -> StepGraph:
        """The graph that runs forward and backward; of a pipeline, the first forward."""
        return next(iter(self.graphs.values()))

    @property
    def recorded_whole(self) -> bool:
        """Whether all calls of a step run as one CUDA graph: graphs that keep values for others are recorded in no
        other way."""
        return any(graph.recording is not None and graph.keeps_values for graph in self.graphs.values())

    @property
    def reports(self) -> list[PassReport]:
        """What the passes report, of all graphs."""
        return [*self.log, *(report for graph in self.graphs.values() for report in graph.log)]

    @property
    def microbatches(self) -> int:
        """Parts that the batch is split into."""
        return 1 + max(call.microbatch for call in self.schedule if call.microbatch is not None)

    def value_key(self, value: Value, call: Call) -> ValueKey:
        """What ``value`` is kept by, as ``call`` gives or reads it."""
        return value, None if value in self._shared else call.microbatch

    @functools.cached_property
    def _shared(self) -> set[Value]:
        """Values that a call for no microbatch gives: one for all of them."""
        once = (self.graphs[call.graph] for call in self.schedule if call.microbatch is None)
        return {what for graph in once for what in graph.outputs if isinstance(what, Value)}

    def last_reads(self) -> dict[ValueKey, int]:
        """For each value that a call reads, the place of its last reader in the schedule."""
        return {
            self.value_key(spec.what, call): place
            for place, call in enumerate(self.schedule)
            for spec in self.graphs[call.graph].inputs
            if isinstance(spec.what, Value)
        }

    @property
    def capture_s(self) -> float:
        """Seconds that the capture of all graphs took."""
        return sum(graph.capture_s for graph in self.graphs.values())

    def text(self) -> str:
        """All graphs as readable text, each under a line with its name and how often a step calls it."""
        if len(self.graphs) == 1:
            return self.main.text()
        counts = zip(self.graphs, self.counted(), strict=True)
        return "\n".join(f"# {name}, called {n} times per step\n{graph.text()}" for name, (graph, n) in counts)

    def count_by_phase(self) -> dict[str, int]:
        """Number of operator nodes in each phase, of all graphs."""
        return dict(sum((Counter(graph.count_by_phase()) for graph in self.graphs.values()), Counter()))

    def calls(self) -> dict[str, Call]:
        """For each graph that the schedule runs, by name, its first call."""
        return {call.graph: call for call in reversed(self.schedule)}

    def counted(self) -> Iterator[tuple[StepGraph, int]]:
        """Each graph, with how often a step calls it."""
        for name, graph in self.graphs.items():
            yield graph, sum(call.graph == name for call in self.schedule)

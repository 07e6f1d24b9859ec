"""`StepProgram`: a training step as named graphs and a schedule of calls.

A plain step is one graph, called once. Accumulation is a schedule over two: the graph of one microbatch, called once
for each, and the graph of the update. Values flow between calls in inputs of kind ``accumulator``, which graphs share
by name and write in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepgraph.graph.step_graph import StepGraph


@dataclass(frozen=True)
class Call:
    """One call of the schedule: a graph by name, and the microbatch that it reads (None: it reads no batch)."""

    graph: str
    microbatch: int | None = None


@dataclass
class StepProgram:
    """``graphs``: by name. ``schedule``: the calls of one step, in order."""

    graphs: dict[str, StepGraph]
    schedule: list[Call]

    @classmethod
    def plain(cls, step: StepGraph) -> "StepProgram":
        """The program of one graph, called once on the whole batch."""
        return cls({"step": step}, [Call("step", 0)])

    @classmethod
    def accumulation(cls, microbatch: StepGraph, update: StepGraph, n: int) -> "StepProgram":
        """``microbatch`` called ``n`` times, then ``update``."""
        calls = [Call("microbatch", k) for k in range(n)]
        return cls({"microbatch": microbatch, "update": update}, [*calls, Call("update")])

    @property
    def main(self) -> StepGraph:
        """The graph that runs forward and backward."""
        return self.graphs[self.schedule[0].graph]

    @property
    def microbatches(self) -> int:
        """Parts that the batch is split into."""
        return sum(call.microbatch is not None for call in self.schedule)

    def counted(self) -> Iterator[tuple[StepGraph, int]]:
        """Each graph, with how often a step calls it."""
        for name, graph in self.graphs.items():
            yield graph, sum(call.graph == name for call in self.schedule)

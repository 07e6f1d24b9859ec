"""Records all calls of a pipeline's step on one rank as one CUDA graph and replays it.

The graph has the calls in the order of the schedule, with sends, receives and the update. Values between calls are in
the memory of the graph, which reuses it from call to call as a step without recording would.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import BatchLeaf
from stepgraph.kernels.comm.exchange import Session
from stepgraph.run.cuda_graph import join_collectives, recording, recording_stream, run_watched, spanned
from stepgraph.run.results import Results

Tensor = torch.Tensor
#: Runs a graph by name on its inputs.
Run = Callable[[str, list[Tensor]], Sequence[Tensor]]


class WholeStep:
    """Runs a step on the leaves of a batch, of the form of the first; state must keep its place.

    As with `GraphRunner` every call is one true step: the first runs node by node, the second records and replays,
    later ones replay. ``calls(leaves, run)`` makes the calls of a step. ``waiting``: after the first call why the step
    cannot be recorded after all, or "".
    """

    def __init__(
        self,
        program: StepProgram,
        calls: Callable[[Sequence[Any], Run | None], Results],
        session: Session,
        groups: Collection[str],
    ):
        self.program, self.calls, self.session, self.groups = program, calls, session, groups
        given = (spec.what for step in program.graphs.values() for spec in step.inputs)
        self.read = sorted({what.leaf for what in given if isinstance(what, BatchLeaf)})
        self.waiting = ""
        self.forget()

    def forget(self) -> None:
        """Nothing is recorded, nor ran before: CUDA graphs are dropped, and later steps record again."""
        self.age = self.session.age(self.groups)
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: list[Any] = []
        self.results = Results()

    def __call__(self, leaves: Sequence[Any]) -> Results:
        if self.age != self.session.age(self.groups):  # a step was broken off: what was recorded waits for other flags
            self.forget()
        if not self.warm:
            results = self._warm_up(leaves)
            self.warm = True
            return results
        if self.graph is None:
            start = time.perf_counter()
            self._record(leaves)
            self.program.main.recording.compile_s += time.perf_counter() - start
        else:
            for i in self.read:
                spanned(self.static[i]).copy_(spanned(leaves[i]), non_blocking=True)
        self.graph.replay()
        return self.results.cloned()

    def _warm_up(self, leaves: Sequence[Any]) -> Results:
        """One step on the stream that will record; nodes that wait for the GPU are noticed."""
        stream = recording_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = self.calls(leaves, self._watched).cloned()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the recording's pool cannot use what the warm-up leaves cached
        return results

    def _watched(self, name: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        results, waiting = run_watched(self.program.graphs[name].executable, inputs)
        if waiting and not self.waiting:
            self.waiting = f"{min(waiting)} in {name} waits for the GPU"
        return results

    def _record(self, leaves: Sequence[Any]) -> None:
        self.static = list(leaves)
        for i in self.read:  # with the strides that kernels know
            leaf = leaves[i]
            self.static[i] = spanned(leaf).clone().as_strided(leaf.shape, leaf.stride())
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with recording(graph, lambda: "the step"):
            self.results = self.calls(self.static, None)
            join_collectives(self.results.tensors(), self.session)
        self.graph = graph

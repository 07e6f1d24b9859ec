"""CUDA graphs: the whole step as one launch.

Matches: every node. Before -> after: the step's kernels, launched one by one -> one replay of a recorded graph.
Exact: the same kernels run in the same order. Preconditions: CUDA tensors. State stays where it is and is the
graph's static memory; the batch is copied into static buffers. A node that needs the host ends one graph and
starts another around it; the report names it.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.capture import StepGraph
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.partition import describe, needs_host, split


@register("cuda_graph", "exact", terminal=True, needs_cuda=True)
def cuda_graph(step: StepGraph, options: object, report: PassReport) -> None:
    """Record the step as CUDA graphs: the first call runs it plainly, the second records, later ones replay."""
    report.matched = sum(1 for _ in step.nodes())
    step.runner = GraphRunner(step, report)


class GraphRunner:
    """Runs a step through CUDA graphs. Call it with the graph's inputs; the state among them must keep its place.

    Every call is one true step: the first runs without recording (kernels are chosen and workspaces allocated), the
    second records each piece and replays it at once, later ones replay.
    """

    def __init__(self, step: StepGraph, report: PassReport):
        self.step, self.report = step, report
        self.is_batch = [spec.kind == "batch" for spec in step.inputs]
        self.forced: set[str] = set()  # nodes that failed to record, by name
        self._split()
        self.reset()

    def _split(self) -> None:
        reasons: dict[fx.Node, str] = {}

        def group(node: fx.Node) -> str:
            reason = "it failed to record" if node.name in self.forced else needs_host(node)
            if reason:
                reasons[node] = reason
            return "host" if reason else "device"

        self.module = split(self.step.executable, group)
        notes = [f"outside the CUDA graph: {describe(node)}: {reason}" for node, reason in reasons.items()]
        self.report.notes = notes
        pieces = sum(piece.group == "device" for piece in self.module.children())
        self.report.changed = self.report.matched - len(reasons)
        self.report.summary = f"{pieces} CUDA graph{'s' * (pieces != 1)}, {len(reasons)} nodes on the host"

    def reset(self) -> None:
        """Forget what was recorded; the next two calls warm up and record again."""
        self.calls = 0
        self.program: list[_Piece] = []
        self.static: list[torch.Tensor] = []

    def __call__(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.calls += 1
        if self.calls == 1:
            return self._warm_up(flat)
        if not self.program:
            start = time.perf_counter()
            results = self._record(flat)
            self.report.compile_s += time.perf_counter() - start
            return results
        for buffer, value, is_batch in zip(self.static, flat, self.is_batch, strict=True):
            if is_batch:
                buffer.copy_(value, non_blocking=True)
        for piece in self.program:
            piece.replay()
        return [value.clone() for value in self.outputs]

    def _warm_up(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = self.step.executable(*flat)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        results = [value.clone() for value in results]
        torch.cuda.empty_cache()  # the recording's pool cannot use what the warm-up leaves cached
        return results

    def _record(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.static = [v.clone() if batch else v for v, batch in zip(flat, self.is_batch, strict=True)]
        pool = torch.cuda.graph_pool_handle()
        values: dict[fx.Node, Any] = {}
        inputs = iter(self.static)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(self.module, node.target)
            elif node.op == "call_module":
                piece = _Piece(getattr(self.module, node.target), fx.map_arg(node.args, values.__getitem__))
                try:
                    values[node] = piece.record(pool)
                except (RuntimeError, torch.AcceleratorError) as error:
                    return self._finish_eagerly(node, values, error)
                self.program.append(piece)
            elif node.op == "call_function":  # getitem of a piece's results
                values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))
            else:
                self.outputs = fx.map_arg(node.args[0], values.__getitem__)
        return [value.clone() for value in self.outputs]

    def _finish_eagerly(self, failed: fx.Node, values: dict[fx.Node, Any], error: Exception) -> Sequence[torch.Tensor]:
        """Recording ``failed`` did not work, and has run nothing: find the node, run the rest of this step plainly."""
        piece = getattr(self.module, failed.target)
        culprit = _first_failing(piece, fx.map_arg(failed.args, values.__getitem__))
        if culprit is None or culprit.name in self.forced:
            raise error
        self.forced.add(culprit.name)
        rest = iter([n for n in self.module.graph.nodes])
        for node in rest:
            if node is failed:
                break
        for node in [failed, *rest]:
            if node.op == "call_module":
                values[node] = getattr(self.module, node.target)(*fx.map_arg(node.args, values.__getitem__))
            elif node.op == "call_function":
                values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))
            elif node.op == "output":
                results = [v.clone() for v in fx.map_arg(node.args[0], values.__getitem__)]
        torch.cuda.synchronize()
        self._split()
        self.program, self.static = [], []
        return results


class _Piece:
    """A piece of the step between two visits to the host: a recorded CUDA graph, or host code run as it is."""

    def __init__(self, module: torch.nn.Module, args: Sequence[Any]):
        self.module, self.args = module, list(args)
        self.graph = torch.cuda.CUDAGraph() if module.group == "device" else None
        self.results: Any = None

    def record(self, pool: Any) -> Any:
        """Record the piece (or just run it) and run it once. Its results stay where later replays write them."""
        if self.graph is None:
            # Later pieces read these tensors in place, so each replay copies its new results into them.
            self.results = self.module(*self.args)
            return self.results
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = self.module(*self.args)
        self.graph.replay()
        return self.results

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        fresh = self.module(*self.args)
        olds, news = (r if isinstance(r, (tuple, list)) else (r,) for r in (self.results, fresh))
        for old, new in zip(olds, news, strict=True):
            if old is not new:
                old.copy_(new)


def _first_failing(piece: torch.nn.Module, args: Sequence[Any]) -> fx.Node | None:
    """The node of ``piece`` that cannot be recorded, found by recording node by node."""
    if not isinstance(piece, fx.GraphModule):
        return None

    class Watch(fx.Interpreter):
        current: fx.Node | None = None

        def run_node(self, n: fx.Node) -> Any:
            Watch.current = n
            return super().run_node(n)

    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            Watch(piece).run(*args)
    except (RuntimeError, torch.AcceleratorError):
        return Watch.current
    return None

"""Records a step as CUDA graphs and replays them.

Records all calls of a pipeline's step on one rank as one CUDA graph and replays it.

The graph has the calls in the order of the schedule, with sends, receives and the update. Values between calls are in
the memory of the graph, which reuses it from call to call as a step without recording would.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import exchanging
from stepgraph.graph.facts import is_launch
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import BatchLeaf
from stepgraph.inductor.regional import nodes_of
from stepgraph.kernels import offload
from stepgraph.kernels.comm.copy_collectives import join, under_way
from stepgraph.kernels.comm.exchange import Session
from stepgraph.passes.compile.cuda_graph import split_at_host
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.memory import Memory
from stepgraph.run.memsets import memsets_to_kernels
from stepgraph.run.results import Results

Tensor = torch.Tensor


class GraphRunner:
    """Runs a step through CUDA graphs. Call it with the graph's inputs; the state among them must keep its place.

    Every call is one true step: the first runs node by node without recording (kernels are chosen, workspaces
    allocated, and nodes that wait for the GPU noticed), the second records each piece and replays it at once, later
    ones replay.
    """

    def __init__(self, step: StepGraph, session: Session, memory: Memory):
        self.step, self.session, self.memory = step, session, memory
        self.groups = exchanging(step.graph)
        self.batch = [i for i, spec in enumerate(step.inputs) if isinstance(spec.what, BatchLeaf)]
        writes, placeholders = Aliases(step.graph).writes, step.placeholders()
        self.written = [i for i in self.batch if writes.get(placeholders[i])]
        self.module = split_at_host(step)
        self.age = self.session.age(self.groups)
        self.forget()

    def forget(self) -> None:
        """Nothing is recorded, nor ran before: CUDA graphs are dropped, and later steps record again."""
        self.warm = False
        self.program: list[_Piece] = []
        self.static: list[Tensor] = []
        self.spans: list[Tensor] = []  # the memory of the batch among them
        self.outputs: Sequence[Tensor] = ()

    def __call__(self, flat: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.age != self.session.age(self.groups):  # a step was broken off: what was recorded waits for other flags
            self.forget()
        if not self.warm:
            self.age = self.session.age(self.groups)
            results = self._warm_up(flat)
            self.warm = True
            return results
        if not self.program:
            start = time.perf_counter()
            results = self._record(flat)
            self.step.recording.compile_s += time.perf_counter() - start
            return results
        for span, i in zip(self.spans, self.batch, strict=True):
            span.copy_(spanned(flat[i]), non_blocking=True)
        for piece in self.program:
            piece.replay()
        self._give_back(flat)
        return [value.clone() for value in self.outputs]

    def _give_back(self, flat: Sequence[Tensor]) -> None:
        """What the step wrote into its batch goes to the caller's tensors, as in eager."""
        for i in self.written:  # their elements alone: what lies between is not the step's
            flat[i].copy_(self.static[i], non_blocking=True)

    def _warm_up(self, flat: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the step once on a stream of its own, and split around the nodes that waited for the GPU.

        They are found here, because a recording that fails leaves torch's random generator unusable.
        """
        stream = recording_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results, waiting = run_watched(self.step.executable, flat)
            results = [value.clone() for value in results]
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the recording's pool cannot use what the warm-up leaves cached
        if waiting:
            self.module = split_at_host(self.step, waiting)
        return results

    def _record(self, flat: Sequence[Tensor]) -> Sequence[Tensor]:
        self.static = list(flat)
        # Kernels know the batch's strides, also for slices and expanded tensors.
        self.spans = [spanned(flat[i]).clone() for i in self.batch]
        for span, i in zip(self.spans, self.batch, strict=True):
            self.static[i] = span.as_strided(flat[i].shape, flat[i].stride())
        values: dict[fx.Node, Any] = {}
        inputs = iter(self.static)
        program: list[_Piece] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(self.module, node.target)
            elif node.op == "call_module":
                piece = _Piece(
                    getattr(self.module, node.target), fx.map_arg(node.args, values.__getitem__), self.session
                )
                values[node] = piece.record(self.memory)
                program.append(piece)
            elif node.op == "call_function":  # getitem of a piece's results
                values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))
            else:
                self.outputs = fx.map_arg(node.args[0], values.__getitem__)
        self.program = program
        self._give_back(flat)
        return [value.clone() for value in self.outputs]


def spanned(tensor: Tensor) -> Tensor:
    """The memory from the first to the last element of ``tensor``, flat, with gaps between its elements."""
    if not tensor.numel():
        return tensor.new_empty(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """The stream of ``device`` for warming up and recording: cuBLAS keeps a workspace (32 MiB) for every stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, what: Callable[[], str], **options: Any) -> Iterator[None]:
    """Record what is launched inside into ``graph``. Raises ``RuntimeError``, naming ``what``, where that cannot be
    recorded. ``options``: of `torch.cuda.graph`."""
    compat.record_nccl_unregistered()
    torch.cuda.synchronize()
    stream = recording_stream(torch.cuda.current_device())
    try:
        # Other threads may continue: NCCL's watchdog asks after events of earlier collectives.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local", **options):
            yield
    except RuntimeError as error:
        reason = first_of(error).splitlines()[0]
        raise RuntimeError(
            f"{what()} cannot be recorded as a CUDA graph: {reason}; leave out the pass cuda_graph"
        ) from error
    memsets_to_kernels(graph)


def run_watched(module: fx.GraphModule, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], set[str]]:
    """Run ``module`` node by node: (its results, names of the nodes that made the host wait for the GPU).

    torch's own check (``torch.cuda.set_sync_debug_mode``) reports them, as warnings.
    """
    waiting: set[str] = set()
    current = ""

    def on_node(node: fx.Node) -> None:
        nonlocal current
        # Only the first launch of a kernel that tunes itself waits.
        current = "" if is_launch(node) and node.target.tunes else node.name

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def listen(message: Warning | str, *rest: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                waiting.update(filter(None, [current]))
            else:
                show(message, *rest, **kwargs)

        warnings.showwarning = listen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return Interpreter(module, on_node)(flat), waiting
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class _Piece:
    """A piece of the step between two visits to the host: a recorded CUDA graph, or host code run as it is."""

    def __init__(self, module: fx.GraphModule, args: Sequence[Any], session: Session):
        self.module, self.args, self.session = module, list(args), session
        self.run = Interpreter(module)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True) if module.group == "device" else None
        self.results: Any = None

    def record(self, memory: Memory) -> Any:
        """Record the piece (or just run it) and run it once. Its results stay where later replays write them."""
        if self.graph is None:
            # Later pieces read these tensors in place, so each replay copies its new results into them.
            before = under_way(self.session), self.session.count
            self.results = self.run(self.args)
            if (under_way(self.session), self.session.count) != before:
                raise RuntimeError(
                    "a part of the step waits for the GPU and communicates over symmetric memory, as CUDA graphs "
                    "around it do; leave out async_tp, copy_engines and expert_exchange=symmetric, or cuda_graph"
                )
            join_collectives(self.results, self.session)
            return self.results
        with recording(self.graph, self._place, pool=memory.pool(self.graph)):
            self.results = self.run(self.args)
            join_collectives(self.results, self.session)
        self.graph.replay()
        return self.results

    def _place(self) -> str:
        calls = [n for n in self.module.graph.nodes if n.op in ("call_function", "call_module")]
        return f"nodes {nodes_of(calls[0])[0]} to {nodes_of(calls[-1])[-1]}"

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        fresh = self.run(self.args)
        join_collectives(fresh, self.session)
        olds, news = (r if isinstance(r, (tuple, list)) else (r,) for r in (self.results, fresh))
        for old, new in zip(olds, news, strict=True):
            if old is not new:
                spanned(old).copy_(spanned(new))


def join_collectives(results: Any, session: Session) -> None:
    """Wait, on the GPU, for collectives whose results a later piece would wait for: a graph may not end before what it
    began, and nothing outside may wait for recorded work. So for copies to the host and back. Does nothing for other
    tensors."""
    offload.join(session)
    if torch.distributed.is_initialized():
        join(session)
        for tensor in compat.pytree.tree_leaves(results):
            if isinstance(tensor, Tensor):
                torch.ops._c10d_functional.wait_tensor(tensor)


def first_of(error: BaseException) -> str:
    """The message of the first error: ending a failed recording fails too."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).strip() or type(error).__name__


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
        memory: Memory,
    ):
        self.program, self.calls, self.session, self.groups, self.memory = program, calls, session, groups, memory
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
        with recording(graph, lambda: "the step", pool=self.memory.pool(graph)):
            self.results = self.calls(self.static, None)
            join_collectives(self.results.tensors(), self.session)
        self.graph = graph

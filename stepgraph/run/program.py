"""Runs a step program: the calls of its schedule, one by one.

Operators that are neither torch's nor ours: whether they give what their fake implementations, with which a step was
traced, say. Graphs hold the shapes, dtypes and strides that these said, and compiled kernels read memory by them.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.batch import microbatch
from stepgraph.capture.state import unwrap
from stepgraph.errors import CaptureError
from stepgraph.graph.collectives import boxes_of, exchanging
from stepgraph.graph.program import StepProgram, ValueKey
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import Call, Kind, StepGraph
from stepgraph.graph.values import BatchLeaf, Before, Input, Loss, ModelTensor, Ratio, Value
from stepgraph.kernels.comm.exchange import Session
from stepgraph.kernels.comm.stage_sends import open_boxes, sent
from stepgraph.passes.compile.cuda_graph import record_apart
from stepgraph.run.cuda_graph import GraphRunner, WholeStep
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.memory import Memory
from stepgraph.run.results import Results
from stepgraph.run.spans import Clock, Passed, RecordedClock, Spans, StreamClock, Waits

Tensor = torch.Tensor

_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_KNOWN = (*_TORCH, "mkldnn", "stepgraph", "stepgraph_autocast")


def foreign_operators(program: StepProgram) -> dict[torch._ops.OpOverload, fx.Node]:
    """The operators of others that ``program`` calls, each with its first node."""
    found: dict[torch._ops.OpOverload, fx.Node] = {}
    for node in (node for step in program.graphs.values() for node in step.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN:
            found.setdefault(node.target, node)
    return found


class Checked(compat.TorchDispatchMode):
    """Inside, results of ``operators`` are compared with their fake implementations' for the same arguments."""

    def __init__(self, operators: Mapping[torch._ops.OpOverload, fx.Node]):
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args, dict(kwargs or {})
        if func not in self.operators:
            return func(*args, **given[1])
        with compat.FakeTensorMode() as mode:
            fakes, keywords = compat.pytree.tree_map_only(Tensor, mode.from_tensor, given)
            said = compat.pytree.tree_leaves(func(*fakes, **keywords))
        made = func(*args, **given[1])
        for real, fake in zip(compat.pytree.tree_leaves(made), said, strict=False):
            if isinstance(real, Tensor) and isinstance(fake, Tensor) and _form(real) != _form(fake):
                place = provenance(self.operators[func]).place
                raise CaptureError(
                    f"{place} calls {func}, which gives {_form(real)}, and its fake implementation says "
                    f"{_form(fake)}, which the step was captured with: correct its register_fake, and try it by "
                    "torch.library.opcheck"
                )
        return made


def _form(tensor: Tensor) -> str:
    """Dtype, shape, strides of the dimensions above 1, and device, as text."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    strided = f" with strides {strides}" if tensor.numel() else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strided} on {tensor.device.type}"


def plain_runner(step: StepGraph) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """What runs one graph without recording it, called with the list of its inputs."""
    if step.executable is not step.module:  # compiled pieces, which free what they were the last to read
        return Interpreter(step.executable)
    compat.generate_code(step.module)
    return lambda flat: step.module.forward(*flat)  # without the hooks that a user gives to every module


def _reset(flat: Sequence[Tensor]) -> None:
    """Minus zero: the one number to which every gradient adds without a change of any bit, minus zero included."""
    for buffer in flat:
        (torch.view_as_real(buffer) if buffer.is_complex() else buffer).fill_(-0.0)


class ProgramRunner:
    """Runs the program of a step on the tensors that its inputs are bound to.

    ``session``: the exchanges of the step's ranks. ``memory``: what it shares with the step's other forms.
    """

    def __init__(self, program: StepProgram, session: Session, memory: Memory):
        self.program, self.session, self.memory = program, session, memory
        self.groups = {name: exchanging(step.graph) for name, step in program.graphs.items()}
        self.every_group = frozenset().union(*self.groups.values())
        self.flat, sums = memory.accumulators(program)
        self.scratch = {compat.storage_key(buffer) for buffer in self.flat}
        #: Where this is set, graphs run node by node, and it is called with a graph's name and a node before that runs.
        self.on_node: Callable[[str, fx.Node], None] | None = None
        held = sums | self._own(program)
        self.bound = {
            name: [held.get(spec.what, spec.tensor) for spec in step.inputs] for name, step in program.graphs.items()
        }
        self.given = {
            name: [(i, s.what) for i, s in enumerate(step.inputs) if isinstance(s.what, BatchLeaf | Value | Loss)]
            for name, step in program.graphs.items()
        }
        boxes = {name: set(boxes_of(step.graph)) for name, step in program.graphs.items()}
        self.boxes = frozenset().union(*boxes.values())
        #: Graphs that end when another stage's message has arrived.
        self.receiving = {name for name, call in program.calls().items() if call.kind.receives and boxes[name]}
        shares = program.graphs.get(Kind.SHARE_LOSS)
        #: Where the moments of a pipeline's calls are noted.
        self.device = shares and shares.placeholders(Loss)[0].meta["val"].device
        self._choose_runners()
        self.unchecked = foreign_operators(program)
        self.waits = Waits()
        self.spans: Spans | None = None
        self.values = Values(program, self.waits)
        self.now: Call | None = None
        """The call that runs; after a failure it stays. None while a CUDA graph of the whole step does."""
        tensors = (t for inputs in self.bound.values() for t in inputs)
        self.on_gpu = any(isinstance(t, Tensor) and t.is_cuda for t in tensors)
        self.passed: Passed | None = None
        """On a GPU, how far its stream has come in the latest step that ran call by call."""

    def _choose_runners(self) -> None:
        """What runs each graph, or all calls together."""
        program, gpu = self.program, self.device is not None and self.device.type == "cuda"
        if program.recorded_whole:
            self.whole = WholeStep(program, self._calls, self.session, self.every_group, self.memory)
            self.runners = {name: plain_runner(step) for name, step in program.graphs.items()}
            self.clock = RecordedClock(2 * len(program.schedule) + 1, self.device)
        else:
            self.whole = None
            self.runners = {
                name: plain_runner(step) if step.recording is None else GraphRunner(step, self.session, self.memory)
                for name, step in program.graphs.items()
            }
            self.clock = StreamClock() if gpu else Clock()

    def _own(self, program: StepProgram) -> dict[Input, Tensor]:
        """Memory for state from before the step, and for ratios."""
        specs = [spec for step in program.graphs.values() for spec in step.inputs]
        live = {spec.what: spec.tensor for spec in specs if isinstance(spec.what, ModelTensor)}
        before = {spec.what: live[spec.what.of] for spec in specs if isinstance(spec.what, Before)}
        kept = {
            what: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for what, tensor in before.items()
        }
        self.kept: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # one kernel copies those of one dtype
        for what, tensor in before.items():
            self.kept.setdefault(tensor.dtype, []).append((kept[what], tensor))
        device = next((tensor.device for tensor in live.values()), None)
        self.ratios = {
            spec.what: torch.zeros((), dtype=torch.float64, device=device)
            for spec in specs
            if isinstance(spec.what, Ratio)
        }
        return kept | self.ratios

    def __call__(self, leaves: Sequence[Any]) -> Results:
        """Run one step on the leaves of a batch."""
        checked = Checked(self.unchecked) if self.unchecked else contextlib.nullcontext()
        with torch.no_grad(), compat.below_autograd(), self.session, checked:
            try:
                for box in self.boxes:
                    open_boxes(self.session, *box)
                results = self._calls(leaves) if self.whole is None or self.on_node else self.whole(leaves)
                self.now, self.unchecked = None, {}
            except BaseException:  # its unfinished work would be mistaken for the next step's
                self.session.forget(self.every_group)
                self.values.clear()
                raise
        self.spans = self.spans and self.spans.by(self.clock.read())
        if self.whole is not None and self.whole.waiting:
            record_apart(self.program, self.whole.waiting)
            self._choose_runners()
        # Clipping may scale an accumulator in place, which the next step clears: the caller's gradient is a copy.
        results.gradients = [g.clone() if compat.storage_key(g) in self.scratch else g for g in results.gradients]
        return results

    def release(self) -> None:
        """Drop the CUDA graphs of the step; later steps record again."""
        for runner in (self.whole, *self.runners.values()):
            if isinstance(runner, WholeStep | GraphRunner):
                runner.forget()

    def _calls(
        self, leaves: Sequence[Any], run: Callable[[str, list[Tensor]], Sequence[Tensor]] | None = None
    ) -> Results:
        """The calls of one step, each by ``run(graph, inputs)`` where that is given."""
        results, values, run = Results(), self.values, run or self._run
        values.clear()
        self._begin()
        for i, call in enumerate(self.program.schedule):
            self.now, self.waits.latest = call, None
            self.session.fence(self.groups[call.graph])
            flat = self._inputs(i, call, leaves, results.loss)
            with self._timed(call):
                made = run(call.graph, flat)
            if self.passed is not None:
                self.passed.note(call, self.waits.latest)
            del flat  # and with it what the call was the last to read
            for what, value in zip(self.program.graphs[call.graph].outputs, made, strict=True):
                if isinstance(what, Value):
                    values.keep(what, call, value)
                else:
                    results.take(what, value)
                if call.microbatch is not None and what in self.ratios:
                    torch.maximum(self.ratios[what], value, out=self.ratios[what])
        sent(self.session)
        return results

    def _timed(self, call: Call) -> contextlib.AbstractContextManager[None]:
        if self.spans is None:
            return contextlib.nullcontext()
        if call.kind is Kind.SHARE_LOSS or call.graph in self.receiving:
            return self.waits.on(call if call.kind.receives else None)
        return self.spans.on(call)

    def _run(self, graph: str, flat: list[Tensor]) -> Sequence[Tensor]:
        if self.on_node is None:
            return self.runners[graph](flat)
        return Interpreter(self.program.graphs[graph].executable, functools.partial(self.on_node, graph))(flat)

    def _begin(self) -> None:
        _reset(self.flat)
        self.clock.begin()
        self.waits = self.values.waits = Waits()
        self.spans = Spans(self.clock) if self.device is not None else None
        self.passed = Passed() if self.on_gpu else None
        for pairs in self.kept.values():
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
        for ratio in self.ratios.values():
            ratio.zero_()

    def _inputs(self, number: int, call: Call, leaves: Sequence[Any], loss: Tensor | None) -> list[Tensor]:
        """The inputs of the call at place ``number`` of the schedule."""
        given, flat = self.given[call.graph], list(self.bound[call.graph])
        n = self.program.microbatches if given else 0
        parts: dict[int, list[Tensor]] = {}
        for i, what in given:
            match what:
                case BatchLeaf(leaf, part):
                    if leaf not in parts:
                        parts[leaf] = unwrap(microbatch(leaves[leaf], call.microbatch, n))[0]
                    flat[i] = parts[leaf][part or 0]
                case Value():
                    flat[i] = self.values.read(what, call, number)
                case Loss():
                    like = self.program.graphs[call.graph].placeholders(Loss)[0].meta["val"]
                    flat[i] = torch.zeros((), dtype=like.dtype, device=like.device) if loss is None else loss
        return flat


class Values:
    """What calls of a program give to later ones. Each is dropped with its last reader."""

    def __init__(self, program: StepProgram, waits: "Waits"):
        self.program, self.waits = program, waits
        self.last = program.last_reads()
        self.clear()

    def clear(self) -> None:
        self._held: dict[ValueKey, Tensor] = {}
        self._arriving: dict[ValueKey, Call] = {}

    def keep(self, what: Value, call: Call, value: Tensor) -> None:
        """``call`` gave ``value``."""
        key = self.program.value_key(what, call)
        if key in self.last:
            self._held[key] = value
            if what.arriving:
                self._arriving[key] = call

    def read(self, what: Value, call: Call, place: int) -> Tensor:
        """The value of ``what`` for ``call``, which has this ``place`` in the schedule; there by the time it is
        computed with."""
        key = self.program.value_key(what, call)
        if key in self._arriving:
            with self.waits.on(self._arriving.pop(key)):
                torch.ops._c10d_functional.wait_tensor(self._held[key])
        return self._held.pop(key) if self.last[key] == place else self._held[key]

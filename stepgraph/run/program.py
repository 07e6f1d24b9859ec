"""Runs a step program: the calls of its schedule, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.state import unwrap
from stepgraph.capture.trace import microbatch
from stepgraph.graph.collectives import exchanging
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.comm.exchange import Session
from stepgraph.run.cuda_graph import GraphRunner, Shared
from stepgraph.run.interpreter import Interpreter

Tensor = torch.Tensor
#: Name, shape, stride, dtype and device of each accumulator.
_Forms = tuple[tuple[str, torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]

#: Accumulators begin at multiples of so many elements: what reads them is then aligned, as in memory of their own.
_ALIGNED = 128


def runner_of(step: StepGraph, shared: Shared | None = None) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """What runs one graph, called with the list of its inputs."""
    if step.recording is not None:
        return GraphRunner(step, shared or Shared(Session()))
    if step.executable is not step.module:  # compiled pieces, which free what they were the last to read
        return Interpreter(step.executable)
    return lambda flat: step.module.forward(*flat)  # without the hooks that a user gives to every module


class Accumulators:
    """Memory for sums of gradients, by the form of what it holds: forms of a step that never run at once share it."""

    def __init__(self) -> None:
        self._held: dict[_Forms, tuple[list[Tensor], dict[str, Tensor]]] = {}

    def of(self, program: StepProgram) -> tuple[list[Tensor], dict[str, Tensor]]:
        """(flat buffers, one for each dtype and device; the accumulators of ``program`` in them, by name)."""
        values = {
            spec.name: node.meta["val"]
            for step in program.graphs.values()
            for node, spec in zip(step.placeholders(), step.inputs, strict=True)
            if spec.kind == "accumulator"
        }
        forms = tuple((name, v.shape, v.stride(), v.dtype, v.device) for name, v in values.items())
        if forms not in self._held:
            self._held[forms] = _allocate(forms)
        return self._held[forms]


def _allocate(forms: _Forms) -> tuple[list[Tensor], dict[str, Tensor]]:
    places: dict[str, int] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, shape, _, dtype, device in forms:
        places[name] = sizes.get((dtype, device), 0)
        sizes[dtype, device] = places[name] + -(-shape.numel() // _ALIGNED) * _ALIGNED
    flat = {key: torch.empty(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    views = {name: flat[d, dev].as_strided(shape, stride, places[name]) for name, shape, stride, d, dev in forms}
    return list(flat.values()), views


def _reset(flat: Sequence[Tensor]) -> None:
    """Minus zero: the one number to which every gradient adds without a change of any bit, minus zero included."""
    for buffer in flat:
        (torch.view_as_real(buffer) if buffer.is_complex() else buffer).fill_(-0.0)


@dataclass
class Results:
    """What a step gave: the loss (the sum of the calls' own), metrics and levels by name, gradients in order."""

    loss: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    levels: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)

    def take(self, step: StepGraph, values: Sequence[Tensor]) -> None:
        """Add the outputs of one call."""
        for spec, value in zip(step.outputs, values, strict=True):
            if spec.kind == "loss":
                self.loss = value if self.loss is None else self.loss + value
            elif spec.kind == "metric":
                self.metrics[spec.name] = value
            elif spec.kind == "level":
                self.levels[spec.name] = value
            else:
                self.gradients.append(value)


class ProgramRunner:
    """Runs the program of a step on the tensors that its inputs are bound to.

    ``tensor_leaves``: which leaves of a batch are tensors. ``session``: the exchanges of the step's ranks.
    """

    def __init__(
        self, program: StepProgram, tensor_leaves: Sequence[int], session: Session, accumulators: Accumulators
    ):
        self.program, self.tensor_leaves, self.session = program, tensor_leaves, session
        self.flat, sums = accumulators.of(program)
        self.scratch = {compat.storage_key(buffer) for buffer in self.flat}
        shared = Shared(session)
        self.groups = {name: exchanging(step.graph) for name, step in program.graphs.items()}
        self.runners = {name: runner_of(step, shared) for name, step in program.graphs.items()}
        held = {("accumulator", name): value for name, value in sums.items()} | self._own(program)
        self.bound = {
            name: [held.get((s.kind, s.name), s.tensor) for s in step.inputs if s.kind != "batch"]
            for name, step in program.graphs.items()
        }

    def _own(self, program: StepProgram) -> dict[tuple[str, str], Tensor]:
        """Memory for state from before the step, and for levels, by kind and name."""
        specs = [spec for step in program.graphs.values() for spec in step.inputs]
        live = {spec.name: spec.tensor for spec in specs if spec.kind in ("parameter", "buffer")}
        before = {spec.name: live[spec.name] for spec in specs if spec.kind == "before"}
        kept = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for name, tensor in before.items()
        }
        self.kept = [(kept[name], tensor) for name, tensor in before.items()]
        device = next((tensor.device for tensor in live.values()), None)
        self.levels = {
            spec.name: torch.zeros((), dtype=torch.float64, device=device) for spec in specs if spec.kind == "level"
        }
        return {("before", name): t for name, t in kept.items()} | {("level", n): t for n, t in self.levels.items()}

    def __call__(self, leaves: Sequence[Any]) -> Results:
        """Run one step on the leaves of a batch."""
        results = Results()
        with torch.no_grad(), compat.below_autograd(), self.session:
            try:
                self._begin()
                for call in self.program.schedule:
                    self.session.fence(self.groups[call.graph])
                    flat = self._inputs(call.graph, call.microbatch, leaves)
                    results.take(self.program.graphs[call.graph], self.runners[call.graph](flat))
                    if call.microbatch is not None:
                        for name, highest in self.levels.items():
                            torch.maximum(highest, results.levels[name], out=highest)
            except BaseException:  # what the step began would be taken for what the next one begins
                self.session.forget(frozenset().union(*self.groups.values()))
                raise
        # Clipping may scale an accumulator in place, which the next step clears: the caller's gradient is a copy.
        results.gradients = [g.clone() if compat.storage_key(g) in self.scratch else g for g in results.gradients]
        return results

    def _begin(self) -> None:
        _reset(self.flat)
        if self.kept:
            torch._foreach_copy_(*map(list, zip(*self.kept, strict=True)))
        for level in self.levels.values():
            level.zero_()

    def _inputs(self, graph: str, part: int | None, leaves: Sequence[Any]) -> list[Tensor]:
        """The inputs of one call; the batch comes last."""
        if part is None:
            return self.bound[graph]
        n = self.program.microbatches
        parts = (microbatch(leaves[i], part, n) for i in self.tensor_leaves)
        return self.bound[graph] + [tensor for leaf in parts for tensor in unwrap(leaf)[0]]

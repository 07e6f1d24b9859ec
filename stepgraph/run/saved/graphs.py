"""A program's graphs as bytes, and back."""

import hashlib
import io
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.fake import fake_mode
from stepgraph.graph.facts import is_launch
from stepgraph.graph.marks import COMPILE, KEEP_EAGER, VISIBLE_PAIRS
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import KEY, provenance
from stepgraph.graph.step_graph import InputSpec, StepGraph
from stepgraph.inductor.packed import NotLoadable, NotSavable, Packed, Packer, Unpacker, read_graph, write_graph

#: What passes and readers look for in a node's ``meta``.
_KEPT = ("val", KEY, KEEP_EAGER, COMPILE, VISIBLE_PAIRS, "recomputes")


@dataclass
class Captured:
    """The objects of a captured program that are not data: its ``constants``, by id -> (graph, name, literal), and its
    ``launches`` of Triton kernels, by id -> (graph, node).

    Passes keep these objects, so a saved graph names them by their place in the capture.
    """

    constants: dict[int, tuple[str, str, bool]]
    launches: dict[int, tuple[str, str]]

    @classmethod
    def of(cls, program: StepProgram) -> "Captured":
        constants, launches = {}, {}
        for graph, step in program.graphs.items():
            for node in step.graph.nodes:
                if node.op == "get_attr":
                    value = _attribute(step.module, node.target)
                    constants[id(value)] = (graph, node.target, _is_literal(node, value))
                elif is_launch(node):
                    launches[id(node.target)] = (graph, node.name)
        return cls(constants, launches)


def _is_literal(node: fx.Node, value: Any) -> bool:
    copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    return isinstance(value, fx.GraphModule) or (copied and value.untyped_storage().resizable())


def _attribute(module: fx.GraphModule, name: str) -> Any:
    return operator.attrgetter(name)(module)


class Writer:
    """Writes the graphs of one program. ``captured``: None for the capture itself, whose objects are described.
    ``canonical``: see `Packer`."""

    def __init__(self, own: torch.device | None, captured: Captured | None, canonical: bool = False):
        self.own, self.captured, self.canonical = own, captured, canonical
        self.constants: list[bytes] = []

    def program(self, program: StepProgram) -> dict[str, Any]:
        graphs = {name: self.step(step) for name, step in program.graphs.items()}
        return {"graphs": graphs, "schedule": list(program.schedule)}

    def step(self, step: StepGraph) -> dict[str, Any]:
        return {
            "inputs": [spec.what for spec in step.inputs],
            "outputs": list(step.outputs),
            "blocks": step.blocks,
            "axes": step.axes,
            "graph": self.graph(step.module),
        }

    def graph(self, module: fx.GraphModule) -> bytes:
        def packed(node: fx.Node) -> Packed:
            try:
                meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
                if self.canonical and KEY in meta:
                    meta[KEY] = tuple(meta[KEY])
                return Packed(node.op, self._target(node, module), node.name, node.args, dict(node.kwargs), meta)
            except NotSavable as reason:
                raise _named(node, reason) from None

        stream = io.BytesIO()
        write_graph(module.graph, Packer(stream, self.own, self.canonical), packed)
        return stream.getvalue()

    def _target(self, node: fx.Node, module: fx.GraphModule) -> Any:
        if node.op == "get_attr":
            return node.target, self._constant(_attribute(module, node.target))
        if node.op != "call_function":
            return node.target
        if is_launch(node):
            return self._launch(node)
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and compat.is_triton_operator(target):
            raise NotSavable(
                f"Inductor may compile the kernels of {target}, a triton_op, into its code, and the graph does not "
                "show them: make it an operator by torch.library.custom_op"
            )
        known = isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator)
        if not known and getattr(operator, getattr(target, "__name__", ""), None) is not target:
            raise NotSavable(f"a call of {target} has no saved form: make it an operator by torch.library.custom_op")
        return target

    def _launch(self, node: fx.Node) -> tuple[str, Any]:
        if self.captured is None:
            return "launch", _described_launch(node.target)
        if id(node.target) not in self.captured.launches:
            raise NotSavable("a pass made this launch of a Triton kernel, which has no saved form")
        return "launch", self.captured.launches[id(node.target)]

    def _constant(self, value: Any) -> tuple[str, Any]:
        """What represents a constant: a graph, its place in the capture, or (its place among the bytes, its form)."""
        if isinstance(value, fx.GraphModule):
            return "graph", self.graph(value)
        if not isinstance(value, torch.Tensor) or compat.is_traceable_wrapper_subclass(value):
            raise NotSavable(f"a constant of type {type(value).__name__} has no saved form")
        graph, name, literal = (self.captured and self.captured.constants.get(id(value))) or (None, None, True)
        if not literal:
            return "live", (graph, name)
        self.constants.append(_bytes_of(value))
        return "bytes", (len(self.constants) - 1, value)


def _named(node: fx.Node, reason: NotSavable) -> NotSavable:
    found = provenance(node)
    where = f" ({found.path or 'the model'}, {found.source})" if found else ""
    return NotSavable(f"node {node.name}{where}: {reason}")


def digest(program: StepProgram, own: torch.device | None = None, captured: Captured | None = None) -> str:
    """A hash of the graphs of ``program`` and of their constants' values."""
    writer, stream = Writer(own, captured, canonical=True), io.BytesIO()
    Packer(stream, canonical=True).add(writer.program(program))
    for data in writer.constants:
        stream.write(hashlib.sha256(data).digest())
    return hashlib.sha256(stream.getvalue()).hexdigest()


def _described_launch(launch: Any) -> list[Any]:
    kept = (compat.triton_kernel_source(launch.kernel), launch.args, launch.kwargs, launch.forms, launch.writes)
    grid = launch.grid if isinstance(launch.grid, tuple) else "a function"
    return [str(launch), repr(grid), *map(repr, kept)]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Reader:
    """Reads what `Writer` wrote, bound to the tensors and objects of ``captured``, a capture with the same key."""

    def __init__(self, own: torch.device | None, constants: list[bytes], captured: StepProgram):
        self.own, self.constants, self.captured = own, constants, captured
        self.tensors = {spec.what: spec.tensor for step in captured.graphs.values() for spec in step.inputs}
        self.mode = fake_mode()

    def program(self, saved: Mapping[str, Any], compiled: Container[str]) -> StepProgram:
        """``compiled``: names of the graphs that compiled pieces run for."""
        graphs = {name: self.step(step, name in compiled) for name, step in saved["graphs"].items()}
        return StepProgram(graphs, saved["schedule"])

    def step(self, saved: Mapping[str, Any], compiled: bool) -> StepGraph:
        inputs = [InputSpec(what, self.tensors.get(what)) for what in saved["inputs"]]
        module = self.graph(saved["graph"], compat.lazy_graph_module if compiled else fx.GraphModule)
        for node, spec in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            _check_form(node, spec)
        return StepGraph(module, inputs, saved["outputs"], saved["blocks"], self.captured.main.mesh, saved["axes"])

    def graph(self, saved: bytes, made: Callable[..., fx.GraphModule] = fx.GraphModule) -> fx.GraphModule:
        attributes: dict[str, Any] = {}

        def target(packed: Packed) -> Any:
            if packed.op == "get_attr":
                name, constant = packed.target
                attributes[name] = self._constant(*constant)
                return name
            if isinstance(packed.target, tuple):
                graph, name = packed.target[1]
                return next(node.target for node in self.captured.graphs[graph].graph.nodes if node.name == name)
            return packed.target

        graph = read_graph(Unpacker(saved, self.mode, self.own), target)
        return made(attributes, graph)

    def _constant(self, kind: str, saved: Any) -> Any:
        if kind == "graph":
            return self.graph(saved)
        if kind == "live":
            graph, name = saved
            return _attribute(self.captured.graphs[graph].module, name)
        place, form = saved
        with compat.without_modes(), torch.no_grad():
            data = torch.frombuffer(bytearray(self.constants[place]) or bytearray(1), dtype=torch.uint8)
            flat = data[: form.numel() * form.element_size()].view(form.dtype).reshape(form.shape)
            made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=form.device)
            return made.copy_(flat)


def _check_form(node: fx.Node, spec: InputSpec) -> None:
    """The live tensor must be what the graph was made for."""
    if spec.tensor is None:
        return
    recorded = node.meta["val"]
    forms = [(t.dtype, tuple(t.shape), t.stride(), t.device.type) for t in (recorded, spec.tensor)]
    if forms[0] != forms[1] and spec.tensor.device.type != "meta":
        raise NotLoadable(
            f"{spec.what.kind} {spec.what.name} is {forms[1]}, saved was {forms[0]} (dtype, shape, strides, device)"
        )

"""A program's graphs as JSON and bytes, and back."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.fake import fake_mode
from stepgraph.graph.facts import is_launch
from stepgraph.graph.marks import COMPILE, KEEP_EAGER, VISIBLE_PAIRS
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import Provenance, Role, provenance, set_provenance
from stepgraph.graph.step_graph import Call, InputSpec, Kind, StepGraph
from stepgraph.graph.values import plain, typed
from stepgraph.passes import PassReport
from stepgraph.run.saved.values import Forms, NotLoadable, NotSavable, Values, decode, encode, target_name, target_named

#: What passes and readers look for in a node's ``meta`` apart from its value and provenance.
_MARKS = (KEEP_EAGER, COMPILE, VISIBLE_PAIRS, "recomputes")


@dataclasses.dataclass
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
    """Writes the graphs of one program. ``captured``: None for the capture itself, whose objects are described."""

    def __init__(self, own: torch.device | None, captured: Captured | None):
        self.own, self.captured = own, captured
        self.constants: list[bytes] = []
        self.operators: dict[str, str] = {}

    def program(self, program: StepProgram) -> dict[str, Any]:
        graphs = {name: self.step(step) for name, step in program.graphs.items()}
        return {"graphs": graphs, "schedule": [list(call) for call in program.schedule], "operators": self.operators}

    def step(self, step: StepGraph) -> dict[str, Any]:
        return {
            "inputs": [plain(spec.what) for spec in step.inputs],
            "outputs": list(map(plain, step.outputs)),
            "blocks": step.blocks,
            "axes": step.axes,
            "graph": self.graph(step.module),
        }

    def graph(self, module: fx.GraphModule) -> dict[str, Any]:
        forms, places, nodes = Forms(self.own), {}, []
        for node in module.graph.nodes:
            try:
                nodes.append(self._node(node, module, forms, places))
            except NotSavable as reason:
                found = provenance(node)
                where = f" ({found.path or 'the model'}, {found.source})" if found else ""
                raise NotSavable(f"node {node.name}{where}: {reason}") from None
        return {"nodes": nodes, "provenance": list(map(json.dumps, places)), "storages": forms.storages}

    def _node(self, node: fx.Node, module: fx.GraphModule, forms: Forms, places: dict) -> list[Any]:
        meta: dict[str, Any] = {mark: node.meta[mark] for mark in _MARKS if mark in node.meta}
        if "val" in node.meta:
            meta["val"] = forms.encode(node.meta["val"])
        if found := provenance(node):
            meta["from"] = places.setdefault(found, len(places))
        arguments = [encode(tuple(node.args), self.own)["tuple"], encode(dict(node.kwargs), self.own)["dict"]]
        return [node.op, self._target(node, module), node.name, *arguments, meta]

    def _target(self, node: fx.Node, module: fx.GraphModule) -> Any:
        if node.op == "get_attr":
            return [node.target, self._constant(_attribute(module, node.target))]
        if node.op != "call_function":
            return node.target
        if is_launch(node):
            return self._launch(node)
        name = target_name(node.target)
        if isinstance(node.target, torch._ops.OpOverload):
            if compat.is_triton_operator(node.target):
                raise NotSavable(
                    f"Inductor may compile the kernels of {name}, a triton_op, into its code, and the graph does not "
                    "show them: make it an operator by torch.library.custom_op"
                )
            self.operators[name] = str(node.target._schema)
        return name

    def _launch(self, node: fx.Node) -> dict[str, Any]:
        if self.captured is None:
            return {"launch": _described_launch(node.target)}
        if id(node.target) not in self.captured.launches:
            raise NotSavable("a pass made this launch of a Triton kernel, which has no saved form")
        return {"launch": self.captured.launches[id(node.target)]}

    def _constant(self, value: Any) -> dict[str, Any]:
        if isinstance(value, fx.GraphModule):
            return {"graph": self.graph(value)}
        if not isinstance(value, torch.Tensor) or compat.is_traceable_wrapper_subclass(value):
            raise NotSavable(f"a constant of type {type(value).__name__} has no saved form")
        graph, name, literal = (self.captured and self.captured.constants.get(id(value))) or (None, None, True)
        if not literal:
            return {"live": [graph, name]}
        form = Forms(self.own)
        self.constants.append(_bytes_of(value))
        return {"bytes": len(self.constants) - 1, "form": form.encode(value), "storages": form.storages}

    @property
    def digest(self) -> list[str]:
        """Hashes of the constants."""
        return [hashlib.sha256(data).hexdigest() for data in self.constants]


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
        for name, schema in saved["operators"].items():
            now = str(target_named(name)._schema)
            if now != schema:
                raise NotLoadable(f"the operator {name} is {now}, saved was {schema}")
        graphs = {name: self.step(step, name in compiled) for name, step in saved["graphs"].items()}
        return StepProgram(graphs, [Call(Kind(kind), *rest) for kind, *rest in saved["schedule"]])

    def step(self, saved: Mapping[str, Any], compiled: bool) -> StepGraph:
        inputs = [InputSpec(what, self.tensors.get(what)) for what in map(typed, saved["inputs"])]
        outputs = list(map(typed, saved["outputs"]))
        module = self.graph(saved["graph"], compat.lazy_graph_module if compiled else fx.GraphModule)
        for node, spec in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            _check_form(node, spec)
        return StepGraph(module, inputs, outputs, saved["blocks"], self.captured.main.mesh, saved["axes"])

    def graph(self, saved: Mapping[str, Any], made: Callable[..., fx.GraphModule] = fx.GraphModule) -> fx.GraphModule:
        graph, attributes, nodes = fx.Graph(), {}, {}
        values = Values(saved["storages"], self.own, self.mode)
        places = [_place(json.loads(text)) for text in saved["provenance"]]
        with compat.without_modes():
            for op, target, name, args, kwargs, meta in saved["nodes"]:
                if op == "get_attr":
                    target, constant = target
                    attributes[target] = self._constant(constant)
                elif op == "call_function":
                    target = self._function(target)
                arguments = (decode({kind: v}, self.own, nodes.__getitem__) for kind, v in
                             (("tuple", args), ("dict", kwargs)))  # fmt: skip
                node = nodes[name] = graph.create_node(op, target, *arguments, name=name)
                if node.name != name:
                    compat.rename_exactly(node, name)
                node.meta.update((mark, meta[mark]) for mark in _MARKS if mark in meta)
                if "val" in meta:
                    node.meta["val"] = values.decode(meta["val"])
                if "from" in meta:
                    set_provenance(node, places[meta["from"]])
        return made(attributes, graph)

    def _function(self, target: Any) -> Any:
        if isinstance(target, str):
            return target_named(target)
        graph, name = target["launch"]
        return next(node.target for node in self.captured.graphs[graph].graph.nodes if node.name == name)

    def _constant(self, saved: Mapping[str, Any]) -> Any:
        if "graph" in saved:
            return self.graph(saved["graph"])
        if "live" in saved:
            graph, name = saved["live"]
            return _attribute(self.captured.graphs[graph].module, name)
        form = Values(saved["storages"], self.own, self.mode).decode(saved["form"])
        with compat.without_modes(), torch.no_grad():
            data = torch.frombuffer(bytearray(self.constants[saved["bytes"]]) or bytearray(1), dtype=torch.uint8)
            flat = data[: form.numel() * form.element_size()].view(form.dtype).reshape(form.shape)
            made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=form.device)
            return made.copy_(flat)


def _place(saved: list[Any]) -> Provenance:
    found = Provenance(*saved)
    return (
        found if found.role is None else found._replace(role=Role(found.role[0], tuple(found.role[1]), found.role[2]))
    )


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


def encode_reports(step: StepGraph) -> dict[str, Any]:
    """The reports of its passes, and which of them asked for CUDA graphs."""
    recording = next((i for i, report in enumerate(step.log) if report is step.recording), None)
    return {"log": [dataclasses.asdict(report) for report in step.log], "recording": recording}


def decode_reports(saved: Mapping[str, Any], step: StepGraph) -> None:
    """Give ``step`` its reports again. Nothing was applied nor compiled: the seconds are none."""
    step.log += map(decode_report, saved["log"])
    if saved["recording"] is not None:
        step.recording = step.log[saved["recording"]]


def decode_report(saved: Mapping[str, Any]) -> PassReport:
    """A report of a pass that was not applied again."""
    return PassReport(**saved | {"apply_s": 0.0, "compile_s": 0.0})

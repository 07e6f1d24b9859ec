"""The key of a start: all that a capture reads. Where it is the same, the capture would be, and is left out."""

import functools
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgraph import compat
from stepgraph.capture import Traced
from stepgraph.capture.batch import first_places, flatten_batch
from stepgraph.capture.guard.conditions import Grow
from stepgraph.capture.optimizer import Update
from stepgraph.capture.python.reads import Reads
from stepgraph.capture.roles import groups_by_axis
from stepgraph.capture.state import Slot, model_slots, unwrap
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import GroupValue, Input, ModelTensor, OptimizerState
from stepgraph.parallel.pipeline import Pipeline
from stepgraph.passes.contract import Pass
from stepgraph.run.saved import key
from stepgraph.run.saved.reads.describe import Describer, Indescribable, form_of
from stepgraph.run.saved.reads.model import describe_hooks, describe_model, module_names
from stepgraph.run.saved.reads.patches import described_patches
from stepgraph.run.saved.reads.sources import Sources
from stepgraph.run.saved.values import NotLoadable

#: Kinds of inputs that are tensors of the model or its optimizer; calls bring or runners allocate the others.
_LIVE = ModelTensor | OptimizerState | GroupValue


@dataclass
class Start:
    """What a step is to be captured of, as `stepgraph.capture` is given it."""

    model: nn.Module
    loss_fn: Callable
    batch: Any
    update: Update | None
    options: Mapping[str, Any]
    passes: Sequence[Pass]
    device: torch.device
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        self.slots = model_slots(self.model)
        self.open: dict[Any, Any] = {}  # see `Describer`
        self.mesh = next((s.tensor.device_mesh for s in self.slots if hasattr(s.tensor, "device_mesh")), None)

    def parts(self) -> dict[str, Any]:
        """The parts of its key beside those of the surroundings. Raises `Indescribable`."""
        around = compat.active_modes()
        if around or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            raise Indescribable(f"the mode around the capture ({', '.join(around) or 'autocast'})")
        leaves, spec = flatten_batch(self.batch)
        forms = [form_of(x) if isinstance(x, torch.Tensor) else f"{type(x).__name__} {x!r}" for x in leaves]
        names = module_names(self.model)
        return {
            "model": describe_model(self.model, Describer(open=self.open)),
            "hooks": describe_hooks(Describer(names, self.open)),
            "patches": described_patches(self.open),
            "loss": Describer(names, self.open)(self.loss_fn, "the loss function"),
            "batch": {str(i): form for i, form in enumerate(forms)}
            | {"structure": f"{type(self.batch).__qualname__} {spec} {first_places(leaves)}"},
            "optimizer": self._optimizer(),
            "options": {name: repr(value) for name, value in self.options.items()},
            "rank": dist.get_rank() if dist.is_initialized() else 0,
        }

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Process groups that a graph may name, by the name that it gives them where no other has it."""
        found = groups_by_axis(slot.tensor for slot in self.slots)
        return found | (self.pipeline.named_groups() if self.pipeline is not None else {})

    def _optimizer(self) -> dict[str, Any]:
        if self.update is None:
            return {}
        names = {id(slot.tensor): slot.name for slot in self.slots}
        found: dict[str, Any] = {"constants": str(self.update.constants())}
        found["kinds"] = [type(optimizer).__name__ for optimizer in self.update.optimizers]
        found["lr"] = [type(group["lr"]).__name__ for group in self.update.groups]
        found["parameters"] = key.digest([[i, names.get(id(p))] for i, p in self.update.owned()])
        states = []
        for optimizer in self.update.optimizers:
            for param, state in optimizer.state.items():
                forms = {name: form_of(v) if isinstance(v, torch.Tensor) else repr(v) for name, v in state.items()}
                states.append([names.get(id(param)), sorted(forms.items()), self._seen(state)])
        found["state"] = key.digest(states)
        return found

    def _seen(self, state: Mapping[str, Any]) -> float | None:
        """Steps that the host counts: parameters with one count share what depends on it."""
        step = state.get("step")
        return float(step) if isinstance(step, torch.Tensor) and step.device.type == "cpu" else None


def record_of(start: Start, traced: Traced, sources: Sources, graph: str) -> bytes:
    """What a start needs beside its graph's entry. Raises `Indescribable`."""
    paths = {id(module): path for path, module in start.model.named_modules()}
    names = {id(slot.tensor): slot.name for slot in traced.slots}
    groups = start.groups()
    for name in {name for step in traced.program.graphs.values() for name in step.axes}:
        if name not in groups:
            raise Indescribable(f"the process group {name}, which is of no mesh of the model")
    record = {
        "graph": graph,
        "sources": sources.files(),
        "globals": sources.globals(start.open),
        "environment": sources.environment(),
        "read": sources.read(),
        "reads": {paths[module]: sorted(found) for module, found in traced.reads.names.items() if module in paths},
        "landing": [slot.name for slot, _ in traced.landing],
        "leaves": traced.tensor_leaves,
        "state": [names[id(p)] for o in start.update.optimizers for p in o.state if id(p) in names]
        if start.update
        else [],
        "grow": {name: _place_of(grow, start.model, name) for name, grow in traced.grow.items()},
    }
    return json.dumps(record).encode()


def _place_of(grow: Grow, model: nn.Module, ratio: str) -> list[Any]:
    """[path of a module, attributes from there, first arguments]: where a loaded step finds ``grow``, a method of
    what a module or its attribute holds, with numbers given. The key tells their classes. Raises `Indescribable`."""
    given = grow.args if isinstance(grow, functools.partial) and not grow.keywords else ()
    method = grow.func if given else grow
    owner = getattr(method, "__self__", None)
    plain = all(isinstance(number, int | float) for number in given)
    for path, module in model.named_modules() if plain and owner is not None else ():
        for name, value in vars(module).items():
            if value is owner:
                return [path, f"{name}.{method.__name__}", given]
            for inner, held in getattr(value, "__dict__", {}).items():
                if held is owner:
                    return [path, f"{name}.{inner}.{method.__name__}", given]
    raise Indescribable(f"what grows where a step exceeds it ({ratio}), which is no method of what a module holds")


class Bindings:
    """The live tensors of a start, by what they are as inputs. State of the optimizer that is missing is created
    as a capture creates it."""

    def __init__(self, start: Start, record: Mapping[str, Any]):
        self.start = start
        self.found: dict[Input, torch.Tensor] = {}
        self.slots = {slot.name: slot for slot in start.slots}
        for slot in start.slots:
            self._add(slot.what, slot.tensor)
        if start.update is not None:
            self._add_optimizer(start.update, set(record["state"]))

    def _add(self, what: Callable[[int | None], Input], tensor: torch.Tensor) -> None:
        inner, _ = unwrap(tensor.detach())
        self.found |= {what(None if len(inner) == 1 else i): part for i, part in enumerate(inner)}

    def _add_optimizer(self, update: Update, stated: set[str]) -> None:
        names = {id(slot.tensor): slot.name for slot in self.start.slots}
        for group, param in update.owned():
            name = names.get(id(param))
            if name is None or not param.requires_grad:
                continue
            if GroupValue(group) not in self.found:
                device = unwrap(param.detach())[0][0].device
                self.found[GroupValue(group)] = update.lr_input(group, device)
            if name in stated:
                for entry, value in update.init_state(param, group).items():
                    self._add(functools.partial(OptimizerState, name, entry), value)

    def __call__(self, what: Input) -> torch.Tensor | None:
        """The tensor of an input; None for what a call brings or a runner allocates."""
        if not isinstance(what, _LIVE):
            return None
        if what not in self.found:
            raise NotLoadable(f"there is no {what.kind} {what.name}")
        return self.found[what]


def traced_of(start: Start, record: Mapping[str, Any], program: StepProgram) -> Traced:
    """What a capture of ``start`` would have given, with the saved program."""
    slots: dict[str, Slot] = {slot.name: slot for slot in start.slots}
    landing = [(slots[name], unwrap(slots[name].tensor.detach())[1]) for name in record["landing"]]
    reads = Reads(start.model)
    modules = dict(start.model.named_modules())
    for path, names in record["reads"].items():
        reads.names[id(modules[path])] = set(names)
    grow = {
        name: functools.partial(operator.attrgetter(attributes)(modules[path]), *given)
        for name, (path, attributes, given) in record["grow"].items()
    }
    return Traced(program, landing, start.slots, record["leaves"], reads, grow)


def name_groups(groups: Mapping[str, dist.ProcessGroup], names: Iterable[str]) -> None:
    """Give process groups the ``names`` that a graph's nodes call them by. Raises `NotLoadable`."""
    for name in names:
        if name not in groups or compat.name_group(groups[name], name) != name:
            raise NotLoadable(f"the process group {name} has another name here")

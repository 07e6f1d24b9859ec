"""The state of a training step as a flat list of plain tensors.

A parameter may be held by several modules (tied weights) and may be a wrapper such as DTensor; the graph sees each
tensor once, as the local tensors inside it. `Slot` says where a tensor of the model lives, so that a trace can put its
stand-in there and take it out again; `Watch` notices cheaply that a user replaced one.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture.python.values import of_program
from stepgraph.errors import CaptureError
from stepgraph.graph.values import Buffer, ModelTensor, Parameter


@dataclass
class Slot:
    """One tensor of the model and every place that holds it.

    ``name``: its first fully qualified name. ``tensor``: the live parameter or buffer. ``places``: the
    ``_parameters`` or ``_buffers`` dictionaries that hold it, with the key in each.
    """

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    places: list[tuple[dict, str]] = field(default_factory=list)
    asked: bool = False
    """Whether forward has asked for its gradient, of which there is none."""
    triangle: tuple[float, float] | None = None
    """Its two values by `triangle_of`, if graphs build it from these instead of reading it."""
    version: int = 0
    """The tensor's version when it was last compared with the triangle."""

    @property
    def path(self) -> str:
        """Path of the module that holds it."""
        return self.what().module

    def what(self, part: int | None = None) -> ModelTensor:
        """What it is as an input of a graph; ``part``: of its local tensors, where it has several."""
        return (Parameter if self.is_parameter else Buffer)(self.name, part)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules by path; a compiled module has the path of its original."""
    return ((compat.uncompiled_path(path), module) for path, module in model.named_modules())


class Whole(nn.Module):
    """A model with modules outside of it whose state a step changes too, such as the discriminator in the loss of a
    generator: what has their tensors. ``outside``: by their paths."""

    def __init__(self, model: nn.Module, outside: Mapping[str, nn.Module]):
        super().__init__()
        vars(self).update(_model=model, _outside=outside)  # no submodules: it only walks over them

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules by their paths, then the others."""
        memo = set() if memo is None else memo
        yield from self._model.named_modules(memo, prefix, remove_duplicate)
        for path, module in self._outside.items():
            yield from module.named_modules(memo, prefix + path, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module at the path ``target``."""
        return dict(self.named_modules())[target]


class OutsideError(CaptureError):
    """The step changes state of a module outside of the model: ``of``, a tensor or the dictionary that holds it."""

    def __init__(self, message: str, of: Any):
        super().__init__(message)
        self.of = of


class TrainsError(CaptureError):
    """Forward makes the parameter or buffer ``name`` require a gradient, which later steps then see."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


def model_slots(model: nn.Module) -> list[Slot]:
    """The model's parameters, then its buffers, each once, in ``named_modules()`` order."""
    found: dict[int, Slot] = {}
    for is_parameter in (True, False):
        for path, module in named_modules(model):
            holder = module._parameters if is_parameter else module._buffers
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                slot = found.setdefault(id(tensor), Slot(name, tensor, is_parameter))
                slot.places.append((holder, key))
    slots = list(found.values())
    for slot in slots:
        check_class(slot.tensor, f"{slot.name} is")
        if compat.has_gradient_hooks(slot.tensor):
            raise CaptureError(
                f"parameter {slot.name} has a gradient hook, which a captured step would not run; "
                "remove it, or apply its effect to the loss or as a pass"
            )
        if slot.tensor.requires_grad and getattr(slot.tensor, "grad_dtype", None) not in (None, slot.tensor.dtype):
            raise CaptureError(
                f"parameter {slot.name} has grad_dtype {slot.tensor.grad_dtype}, and a captured step has gradients in "
                f"the parameter's {slot.tensor.dtype}; leave it, or use stepgraph.MasterAdamW for fp32 updates"
            )
    return slots


#: What a class has that adds nothing to that of its tensors.
_EMPTY = {"__module__", "__doc__", "__qualname__", "__dict__", "__weakref__", "__annotations__", "__annotate_func__"}
_EMPTY |= {"__firstlineno__", "__static_attributes__", "__annotations_cache__", "__parameters__", "__orig_bases__"}


def check_class(tensor: torch.Tensor, holds: str) -> None:
    """Raise for a tensor of a class of the user's that adds to torch's: a trace has neither its methods nor results of
    its class. ``holds``: how the message begins."""
    cls = type(tensor)
    if cls in (torch.Tensor, nn.Parameter) or compat.is_traceable_wrapper_subclass(tensor):
        return
    own = [base for base in cls.__mro__ if of_program(base)]
    if own and (not issubclass(cls, nn.Parameter) or any(vars(base).keys() - _EMPTY for base in own)):
        raise CaptureError(
            f"{holds} a {cls.__qualname__}, whose methods and attributes a captured step does not have; make it a "
            "plain tensor, as by .as_subclass(torch.Tensor), or a plain nn.Parameter"
        )


def put_back(model: nn.Module, slots: list[Slot]) -> None:
    """Parameters among the parameters again that forward left among the buffers: a parametrization for the time of a
    call, as peft's of fused experts, puts back what is no ``Parameter`` in a trace as a buffer."""
    missing = {(id(holder), key) for slot in slots for holder, key in slot.places if key not in holder}
    for module in model.modules() if missing else ():
        for key in [key for key in module._buffers if (id(module._parameters), key) in missing]:
            module._parameters[key] = module._buffers.pop(key)


def triangle_of(tensor: torch.Tensor) -> tuple[float, float] | None:
    """(the value on and below the diagonal, the other value above it) of ``tensor`` (1, ..., T, T), such as a causal
    mask; None for any other tensor."""
    size = tensor.shape[-1] if tensor.ndim > 1 else 0
    if size < 2 or tensor.numel() != size * size or tensor.shape[-2] != size:
        return None
    if tensor.is_inference() or not tensor.is_contiguous() or tensor.dtype.is_complex:
        return None
    square = tensor.detach().reshape(size, size)
    low, high = square[-1, 0], square[0, -1]
    seen = torch.ones_like(square, dtype=torch.bool).tril()
    is_triangle = low != high and torch.equal(square, torch.where(seen, low, high))
    return (low.item(), high.item()) if is_triangle else None


class Watch:
    """Notices that the user replaced a tensor that a captured step is bound to.

    Runs in every step over every tensor of the state, so its loops are those of the interpreter itself (``map``).
    """

    def __init__(self, slots: Sequence[Slot], optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._holders = [holder for slot in slots for holder, _ in slot.places]
        self._keys = [key for slot in slots for _, key in slot.places]
        self._held = [slot.tensor for slot in slots for _ in slot.places]
        self._states, self._groups = self._state_dicts(), self._parameters()
        self._entries = self._state_entries()
        counts = (state["step"] for state in self._states if isinstance(state.get("step"), torch.Tensor))
        self._counts = [count for count in counts if count.device.type == "cpu" and not compat.is_fake(count)]
        self._versions, self._alike = self._count_versions(), self._alike_counts()
        self._tensors = [slot.tensor for slot in slots]
        wrapped = [(t, unwrap(t)) for t in self._tensors if compat.is_traceable_wrapper_subclass(t)]
        self._inner = [
            (t, name)
            for t, (parts, wrapping) in wrapped
            for part, name in zip(parts, wrapping.names, strict=True)
            if not compat.is_fake(part)
        ]
        self._plain = [t for t in self._tensors if type(t) in (torch.Tensor, nn.Parameter)]
        self._asked = [slot.tensor for slot in slots if slot.asked]
        self._triangles = [slot for slot in slots if slot.triangle is not None]
        self._seen = self._look()

    def _look(self) -> tuple:
        """Where data lies (``param.data = ...`` and ``model.to(...)`` change it and not the object); what trains."""
        inner = [getattr(t, name).data_ptr() for t, name in self._inner]
        places = list(map(torch.Tensor.data_ptr, self._plain))
        gradients = [t.grad is not None for t in self._asked]
        return places, inner, list(map(attrgetter("requires_grad"), self._tensors)), gradients

    def _state_dicts(self) -> list[dict]:
        return [state for optimizer in self._optimizers for state in optimizer.state.values()]

    def _state_entries(self) -> list:
        entries = chain.from_iterable(map(dict.values, self._states))
        return [entry for entry in entries if type(entry) not in (int, float)]  # which a step may count in

    def _parameters(self) -> list[torch.Tensor]:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return list(chain.from_iterable(map(itemgetter("params"), groups)))

    def _count_versions(self) -> list[int]:
        """A captured step writes below autograd, and so does not change them."""
        return list(map(attrgetter("_version"), self._counts))

    def _alike_counts(self) -> list[int]:
        """For each count of steps on the host, where the first one with its value is: they share nodes."""
        first: dict[float, int] = {}
        return [first.setdefault(count, i) for i, count in enumerate(map(float, self._counts))]

    def _sees_counts_part(self) -> bool:
        versions = self._count_versions()
        if versions == self._versions:
            return False
        self._versions = versions
        return self._alike_counts() != self._alike

    def _sees_triangle(self) -> bool:
        for slot in self._triangles:
            if slot.version != slot.tensor._version:
                if triangle_of(slot.tensor) != slot.triangle:
                    return True
                slot.version = slot.tensor._version
        return False

    def sees_change(self) -> bool:
        """Whether the step must be bound, and so captured, again."""
        if not all(map(is_, map(dict.get, self._holders, self._keys), self._held)):
            return True
        states = self._state_dicts()
        if not _are(states, self._states) or not _are(self._state_entries(), self._entries):
            return True
        if not _are(self._parameters(), self._groups) or self._sees_counts_part() or self._look() != self._seen:
            return True
        return self._sees_triangle()


def _are(now: list, before: list) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


@contextlib.contextmanager
def swapped(model: nn.Module, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the model holds ``tensors`` instead of its own; assignments to them are undone at the end."""
    held = [d for m in model.modules() for d in (vars(m), m._parameters, m._buffers, m._modules)]
    held += [holder for slot in slots for holder, _ in slot.places]  # of modules outside of the model
    held = list({id(d): d for d in held}.values())
    saved = [dict(d) for d in held]
    try:
        for slot, tensor in zip(slots, tensors, strict=True):
            for holder, key in slot.places:
                holder[key] = tensor
        yield
    finally:
        for now, before in zip(held, saved, strict=True):
            now.clear()
            now.update(before)


class KeptTensor(NamedTuple):
    """The id of a fake tensor that a module holds, where, and whether as a parameter or buffer."""

    id: int
    place: str
    is_state: bool


def kept_tensors(model: nn.Module) -> list[KeptTensor]:
    """Fake tensors that the model's modules hold, in attributes or in containers in them."""
    found = []
    for path, module in named_modules(model):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                leaves = [value]
            elif isinstance(value, (dict, list, tuple, set)) and value and key != "_modules":
                leaves = compat.pytree.tree_leaves(list(value) if isinstance(value, set) else value)
            else:
                continue
            place, is_state = f"{path or 'model'}.{key}", key in ("_parameters", "_buffers")
            fakes = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and compat.is_fake(leaf)]
            found += [KeptTensor(id(fake), place, is_state) for fake in fakes]
    return found


@dataclass
class Wrapping:
    """How to rebuild one wrapped tensor from its local tensors.

    ``names``: attributes of its tensors. ``others``: attributes that are not tensors, such as a mesh. ``context``: what
    the tensor's class says of it in addition.
    """

    names: list[str]
    others: dict[str, object]
    context: object
    kind: type
    size: torch.Size
    stride: tuple[int, ...]


def unwrap(tensor: torch.Tensor) -> tuple[list[torch.Tensor], Wrapping | None]:
    """The local tensors inside ``tensor`` and how to wrap them again (None: it is plain)."""
    if not compat.is_traceable_wrapper_subclass(tensor):
        return [tensor], None
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inner = {name: t for name, t in parts.items() if isinstance(t, torch.Tensor)}
    for t in inner.values():
        if compat.is_traceable_wrapper_subclass(t):
            raise CaptureError(f"nested tensor wrappers are not supported: {type(tensor).__name__} holds {type(t)}")
    others = {name: value for name, value in parts.items() if name not in inner}
    wrapping = Wrapping(list(inner), others, context, type(tensor), tensor.size(), tensor.stride())
    return list(inner.values()), wrapping


def wrap(inner: Sequence[torch.Tensor], wrapping: Wrapping | None) -> torch.Tensor:
    """The inverse of `unwrap`."""
    if wrapping is None:
        (plain,) = inner
        return plain
    parts = dict(zip(wrapping.names, inner, strict=True)) | wrapping.others
    return wrapping.kind.__tensor_unflatten__(parts, wrapping.context, wrapping.size, wrapping.stride)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Paths of the model's outermost repeated blocks, in order: the elements of its ``ModuleList``s.

    These are the natural units of recomputation and bucketing. A ``Sequential`` counts only if it has no
    ``ModuleList`` above it and holds at least two children of one type.
    """
    blocks: list[str] = []
    for path, module in named_modules(model):
        if any(path == b or path.startswith(b + ".") for b in blocks):
            continue
        children = dict(module.named_children())
        is_list = isinstance(module, nn.ModuleList)
        kinds = {type(child) for child in children.values()}
        is_tower = isinstance(module, nn.Sequential) and len(children) > 1 and len(kinds) == 1
        if is_list or is_tower:
            blocks += [f"{path}.{name}" if path else name for name in children]
    return blocks

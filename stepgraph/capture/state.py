"""The state of a training step as a flat list of plain tensors.

A parameter may be held by several modules (tied weights) and may be a wrapper such as DTensor; the graph sees each
tensor once, as the local tensors inside it. `Slot` says where a tensor of the model lives, so that a trace can put
its stand-in there and take it out again, and so that a step can see cheaply that a user replaced it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from stepgraph import compat
from stepgraph.errors import CaptureError


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

    @property
    def path(self) -> str:
        """Path of the module that holds it."""
        return self.name.rpartition(".")[0]

    def moved(self) -> bool:
        """Whether any module now holds another tensor in this slot's place."""
        return any(holder.get(key) is not self.tensor for holder, key in self.places)


def model_slots(model: nn.Module) -> list[Slot]:
    """The model's parameters, then its buffers, each once, in ``named_modules()`` order."""
    found: dict[int, Slot] = {}
    for is_parameter in (True, False):
        for path, module in model.named_modules():
            holder = module._parameters if is_parameter else module._buffers
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                slot = found.setdefault(id(tensor), Slot(name, tensor, is_parameter))
                slot.places.append((holder, key))
    slots = list(found.values())
    for slot in slots:
        hooks = slot.tensor._backward_hooks or getattr(slot.tensor, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise CaptureError(
                f"parameter {slot.name} has a gradient hook, which a captured step would not run; "
                "remove it, or apply its effect to the loss or as a pass"
            )
    return slots


@contextlib.contextmanager
def swapped(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """The model holds ``tensors`` in place of its own while inside."""
    try:
        for slot, tensor in zip(slots, tensors, strict=True):
            for holder, key in slot.places:
                holder[key] = tensor
        yield
    finally:
        for slot in slots:
            for holder, key in slot.places:
                holder[key] = slot.tensor


@dataclass
class Wrapping:
    """How to rebuild one tensor from its local tensors. ``context`` is None for a plain tensor."""

    names: list[str]
    context: object
    kind: type
    size: torch.Size
    stride: tuple[int, ...]


def unwrap(tensor: torch.Tensor) -> tuple[list[torch.Tensor], Wrapping | None]:
    """The local tensors inside ``tensor`` and how to wrap them again (None: it is plain)."""
    if not compat.is_traceable_wrapper_subclass(tensor):
        return [tensor], None
    names, context = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    for t in inner:
        if compat.is_traceable_wrapper_subclass(t):
            raise CaptureError(f"nested tensor wrappers are not supported: {type(tensor).__name__} holds {type(t)}")
    return inner, Wrapping(names, context, type(tensor), tensor.size(), tensor.stride())


def wrap(inner: Sequence[torch.Tensor], wrapping: Wrapping | None) -> torch.Tensor:
    """The inverse of `unwrap`."""
    if wrapping is None:
        (plain,) = inner
        return plain
    parts = dict(zip(wrapping.names, inner, strict=True))
    return wrapping.kind.__tensor_unflatten__(parts, wrapping.context, wrapping.size, wrapping.stride)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Paths of the model's outermost repeated blocks, in order: the elements of its ``ModuleList``s.

    These are the natural units of recomputation and bucketing. A ``Sequential`` counts only if it has no
    ``ModuleList`` above it and holds at least two children of one type.
    """
    blocks: list[str] = []
    for path, module in model.named_modules():
        if any(path == b or path.startswith(b + ".") for b in blocks):
            continue
        children = dict(module.named_children())
        is_list = isinstance(module, nn.ModuleList)
        kinds = {type(child) for child in children.values()}
        is_tower = isinstance(module, nn.Sequential) and len(children) > 1 and len(kinds) == 1
        if is_list or is_tower:
            blocks += [f"{path}.{name}" if path else name for name in children]
    return blocks

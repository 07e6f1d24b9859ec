"""Buffer updates by modules: tensors that forward assigns, which a captured step writes into the buffers; and a
method ``end_of_step(self)``, which runs once per step, after the optimizer's update.

It updates the module's buffers after forward and backward, in place or by assignment, and returns
metrics by name, or None. A captured step with an optimizer has it in its graph: with accumulation once for all
microbatches. A loop of one's own calls `end_of_step`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.recorder import Recorder
from stepgraph.capture.state import Slot, named_modules, swapped, unwrap
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases, memory_span


def _declared(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in named_modules(model) if hasattr(type(module), "end_of_step"))


def _run(path: str, module: nn.Module) -> dict[str, Tensor]:
    found = module.end_of_step()
    if not isinstance(found, dict | None) or not all(isinstance(value, Tensor) for value in (found or {}).values()):
        raise CaptureError(
            f"end_of_step of {path or 'the model'} returned {type(found).__name__}; return a dict of tensors by name, "
            "or None"
        )
    return {f"{path}.{name}" if path else name: value for name, value in (found or {}).items()}


@torch.no_grad()
def end_of_step(model: nn.Module) -> dict[str, Tensor]:
    """Call ``end_of_step()`` of every module of ``model`` that has one; their metrics, by module path and name.

    For loops that step the optimizer themselves: call it once per step, after ``optimizer.step()``. A step captured
    with an optimizer does the same in its graph, and has the metrics in ``step.metrics``.
    """
    metrics: dict[str, Tensor] = {}
    for path, module in _declared(model):
        metrics |= _run(path, module)
    return metrics


def traced_end_of_step(
    recorder: Recorder, model: nn.Module, slots: Sequence[Slot], tensors: Sequence[Tensor], flat: Sequence[Tensor]
) -> tuple[dict[str, Tensor], list[int]]:
    """The same in a trace, where the model holds ``tensors``, made of ``flat``, in its ``slots``; and those written."""
    metrics: dict[str, Tensor] = {}
    versions = _versions(tensors)
    with swapped(model, slots, tensors):
        for path, module in _declared(model):
            recorder.attribute(path)
            metrics |= _run(path, module)
        held = [(s, t, holder[key]) for s, t in zip(slots, tensors, strict=True) for holder, key in s.places]
    write_assigned(recorder, held, flat)
    written = [i for i, (old, new) in enumerate(zip(versions, _versions(tensors), strict=True)) if old != new]
    return dict(zip(metrics, gradients.unshared(metrics.values(), taken=flat), strict=True)), written


def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """How often each tensor was written in place."""
    return [tuple(inner._version for inner in unwrap(tensor)[0]) for tensor in tensors]


def write_assigned(
    recorder: Recorder, held: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]], flat: Sequence[torch.Tensor]
) -> None:
    """Write tensors that forward assigned to buffers into the buffers. ``held``: (slot, its stand-in, what is held)."""
    for slot, old, _ in held:
        forms = [(list(tensor.shape), tensor.stride()) for tensor in (slot.tensor, old)]
        if forms[0] != forms[1]:
            (a, strides), (b, others) = forms
            change = f"from {a} to {b}" if a != b else f"from strides {strides} to {others}"
            raise CaptureError(
                f"forward reshapes {slot.name} in place, {change}; a captured step cannot change the form of its "
                "state, reshape a view of it"
            )
    assigned = [(slot, old, new) for slot, old, new in held if new is not old]
    for slot, old, new in assigned:
        if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
            form = "None" if new is None else _form(new)
            raise CaptureError(
                f"forward replaces {slot.name}, {_form(old)}, by {form}; a captured step cannot change the form of its "
                "state, keep shape, dtype and device, or run the model once before the capture if it grows only once"
            )
    if assigned:
        _refuse_shared(held)
    values = gradients.unshared([new for _, _, new in assigned], taken=flat)  # one buffer may hold another's old value
    for (slot, old, _), value in zip(assigned, values, strict=True):
        recorder.attribute(slot.path)
        old.copy_(value)


def _refuse_shared(held: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]]) -> None:
    """Raise where two places would be one tensor in eager's next step and not in a captured one, or the other way
    round, and what is written in one is to be seen in the other."""
    first: dict[str, torch.Tensor] = {}
    for slot, _, new in held:
        if first.setdefault(slot.name, new) is not new:
            raise CaptureError(
                f"forward replaces {slot.name} in one of the modules that share it, and a captured step keeps one "
                "tensor for all; replace it in each of them by the same tensor, or write in place"
            )
    plain = [entry for entry in held if not compat.is_traceable_wrapper_subclass(entry[2])]
    aliases = Aliases(compat.graph_of_trace())
    for slot, old, new in plain:
        for other, before, now in plain if new is not old else ():
            shares = other is not slot and _overlap(old, before)
            if other is not slot and _overlap(new, now):
                roots = [aliases.root(compat.node_of_trace(tensor)) for tensor in (old, before)]
                updated = slot.tensor.requires_grad or other.tensor.requires_grad
                shares = shares or updated or any(map(aliases.writes.get, roots))
            if shares:
                raise CaptureError(
                    f"forward replaces {slot.name}, and {other.name} shares its old memory or its new one; a captured "
                    "step would not keep this as eager does: assign a clone(), or write in place"
                )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (storage, start, end), (other, begin, stop) = memory_span(a), memory_span(b)
    return storage == other and start < stop and begin < end


def _form(tensor: torch.Tensor) -> str:
    return f"a {tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"

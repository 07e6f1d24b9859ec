"""Tensors that forward assigns to buffers, which a captured step writes into the buffers instead."""

from collections.abc import Sequence

import torch

from stepgraph import compat
from stepgraph.capture import gradients
from stepgraph.capture.recorder import Recorder
from stepgraph.capture.state import Slot
from stepgraph.errors import CaptureError
from stepgraph.graph.aliases import Aliases, memory_span


def write_assigned(
    recorder: Recorder, held: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]], flat: Sequence[torch.Tensor]
) -> None:
    """Write tensors that forward assigned to buffers into the buffers. ``held``: (slot, its stand-in, what is held)."""
    for slot, old, _ in held:
        if (old.shape, old.stride()) != (slot.tensor.shape, slot.tensor.stride()):
            raise CaptureError(
                f"forward reshapes {slot.name} in place, from {list(slot.tensor.shape)} to {list(old.shape)}; "
                "a captured step cannot change the form of its state, reshape a view of it"
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

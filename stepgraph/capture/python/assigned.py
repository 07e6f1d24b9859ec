"""Tensors that forward assigns to buffers, which a captured step writes into the buffers instead."""

from collections.abc import Sequence

import torch

from stepgraph.capture import gradients
from stepgraph.capture.recorder import Recorder
from stepgraph.capture.state import Slot
from stepgraph.errors import CaptureError


def write_assigned(
    recorder: Recorder, held: Sequence[tuple[Slot, torch.Tensor, torch.Tensor]], flat: Sequence[torch.Tensor]
) -> None:
    """Write tensors that forward assigned to buffers into the buffers. ``held``: (slot, its stand-in, what is held)."""
    for slot, old, _ in held:
        if old.shape != slot.tensor.shape:
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
    values = gradients.unshared([new for _, _, new in assigned], taken=flat)  # one buffer may hold another's old value
    for (slot, old, _), value in zip(assigned, values, strict=True):
        recorder.attribute(slot.path)
        old.copy_(value)


def _form(tensor: torch.Tensor) -> str:
    return f"a {tensor.dtype} tensor of shape {list(tensor.shape)} on {tensor.device}"

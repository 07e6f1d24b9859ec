"""A method ``end_of_step(self)`` of modules, which runs once per step, after the optimizer's update.

It changes the module's buffers, in place or by assignment, from what forward and backward left in them, and returns
metrics by name, or None. A captured step with an optimizer has it in its graph: with accumulation once for all
microbatches. A loop of one's own calls `end_of_step`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stepgraph.capture import gradients
from stepgraph.capture.python.assigned import write_assigned
from stepgraph.capture.recorder import Recorder
from stepgraph.capture.state import Slot, named_modules, swapped, unwrap
from stepgraph.errors import CaptureError


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

"""What capture refuses, before, during and after the trace: one line each, with module path and source line."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture.optimizer import Update
from stepgraph.capture.recorder import Recorder, user_source
from stepgraph.capture.state import Slot, kept_tensors
from stepgraph.errors import CaptureError
from stepgraph.graph.provenance import provenance
from stepgraph.graph.step_graph import StepGraph


def check_microbatches(leaves: Sequence[Any], accumulate: int) -> None:
    """Raise unless the batch divides into ``accumulate`` microbatches."""
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} is not allowed; it counts microbatches, 1 or more")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] % accumulate:
            raise ValueError(
                f"accumulate={accumulate} does not divide the batch's first dimension {leaf.shape[0]}; "
                f"try accumulate={max(d for d in range(1, accumulate) if leaf.shape[0] % d == 0)}"
            )


def check_owned(update: Update | None, slots: Sequence[Slot]) -> None:
    """Every parameter of the optimizer is the model's."""
    known = {id(slot.tensor) for slot in slots}
    for _, param in update.owned() if update else ():
        if id(param) not in known:
            raise CaptureError(
                f"the optimizer holds a parameter of shape {list(param.shape)} that the model does not; "
                "build the optimizer from model.parameters()"
            )


def check_max_norm(max_grad_norm: float | None) -> None:
    """Raise unless ``max_grad_norm`` is None or above 0."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0; give None for no clipping")


def check_loss(loss: Any) -> None:
    """Raise unless ``loss`` is a plain floating-point scalar that requires a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned a {type(loss).__name__}; it must return a scalar tensor")
    if loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"loss_fn returned a {loss.dtype} tensor of shape {list(loss.shape)}; it must return a floating-point "
            "scalar, such as loss.mean()"
        )
    if compat.is_traceable_wrapper_subclass(loss):
        raise CaptureError(
            f"loss_fn returned a {type(loss).__name__}; return a plain tensor, such as loss.full_tensor()"
        )
    if loss.grad_fn is None:
        raise CaptureError("the loss depends on no parameter that requires a gradient; check requires_grad and no_grad")


def refuse_kept(model: nn.Module, known: set[int]) -> None:
    """Raise if a module keeps a tensor of the step: it would be fake, and stale in the next step."""
    for key, where in kept_tensors(model).items():
        if key not in known:
            raise CaptureError(f"{where}, which a captured step cannot do; register it as a buffer")


def refuse_fake_constants(step: StepGraph) -> None:
    """Raise if the graph reads a fake tensor that the trace did not record: it would never have a value."""
    for node in step.graph.find_nodes(op="get_attr"):
        value = getattr(step.module, node.target)
        inside = list(value.modules()) if isinstance(value, nn.Module) else []
        held = [
            value,
            *(t for m in inside for t in vars(m).values()),
            *(t for m in inside for t in m._buffers.values()),
        ]
        if any(map(compat.is_fake, held)):
            where = provenance(next(iter(node.users)))
            raise CaptureError(
                f"{where.path or 'the model'} ({where.source}) reads a tensor of the step that the trace did not see, "
                "such as one that FlexAttention's score_mod or mask_mod takes from outside; pass it as an argument"
            )


@contextlib.contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Report failures of the trace for lack of a tensor's value in one line, with module path and source line."""
    try:
        yield
    except Exception as error:
        operator = compat.operator_needing_values(error)
        if operator is None:
            raise
        path = recorder.stack[-1] if recorder.stack else ""
        raise CaptureError(
            f"cannot capture {path or 'the model'} at {user_source(error)}: {operator} needs a tensor's value while "
            "the step is only shapes (.item(), bool(tensor), nonzero and the like); use torch.where or masks"
        ) from error

"""`metric`: reports a number of the step from the loss or a module, without Python waiting for it.

A trace collects the numbers (`collected`), which become outputs of the graph; eager code outside a capture drops them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from stepgraph import compat
from stepgraph.errors import CaptureError

#: Names of metrics that every captured step has, and of what records of a run have.
_OWN = ("loss", "grad_norm", "skipped", "repeated", "step", "step_ms", "tokens_per_s", "mfu", "mem_gib", "lr", "tokens")
_OWN += ("each", "data_ms", "repeated_steps", "epoch", "learning_rate")

#: The value of each microbatch, which is not a mean.
EACH = "each"

_open: list[dict[str, torch.Tensor]] = []


def metric(name: str, value: torch.Tensor) -> None:
    """Report ``value`` of the running step under ``name``, without waiting for it.

    Call it in the loss function or in a module's forward, with a plain tensor of any shape and a name for each call.
    ``step.metrics[name]`` of the captured step then has the value, detached; with ``accumulate=N`` the mean over the N
    microbatches, in fp32 if it is not floating-point. Outside a capture it does nothing. Raises
    `stepgraph.CaptureError` for anything but a plain tensor, and for a name that the step has already.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if not isinstance(value, torch.Tensor) or compat.is_traceable_wrapper_subclass(value):
        raise CaptureError(
            f"metric {name!r} was given a {type(value).__name__}; pass it a plain tensor, such as loss.detach() or "
            "value.full_tensor()"
        )
    if not _open:
        return
    if name in _OWN or name in _open[-1]:
        reason = "is a name that records have already" if name in _OWN else "was reported already in this step"
        raise CaptureError(f"metric {name!r} {reason}; give each metric its own name, such as {name + '_2'!r}")
    _open[-1][name] = value.detach().clone()


def each(value: torch.Tensor) -> None:
    """Report ``value`` of each microbatch, which ``step.metrics[EACH]`` has one by one."""
    if _open:
        _open[-1][EACH] = value.detach().clone()


@contextlib.contextmanager
def collected() -> Iterator[dict[str, torch.Tensor]]:
    """What is reported inside, by name."""
    found: dict[str, torch.Tensor] = {}
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)


def reported(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The scalars and vectors among a step's metrics that its model or loss reported."""
    return {name: value for name, value in metrics.items() if name not in _OWN and value.ndim <= 1}


def means(found: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The metrics of a step, of which each microbatch reported one value."""
    return {
        name: torch.stack(list(values)) if name == EACH else values[0] if len(values) == 1 else _mean(values)
        for name, values in found.items()
    }


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(values))
    return (stacked if stacked.is_floating_point() else stacked.float()).mean(dim=0)

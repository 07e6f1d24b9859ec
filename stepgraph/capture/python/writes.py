"""Changes that forward and the loss make to Python objects; a captured step would keep the first values forever."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stepgraph.capture.python.reads import Change
from stepgraph.capture.python.values import ABSENT, fake_inside, kind_of
from stepgraph.capture.state import OutsideError
from stepgraph.errors import CaptureError
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph


def refuse_kept(changes: Sequence[Change]) -> None:
    """Raise for a tensor of the step that the loss keeps outside of the model: it would be fake, and stale later."""
    for change in changes:
        if not change.of_model and fake_inside(change.new):
            raise OutsideError(
                f"the loss keeps a tensor of the step in {change.where}, which a captured step cannot do; keep it in a "
                "buffer of a module, or report it by stepgraph.metric(name, tensor)",
                change.holder,
            )


def refuse_by_optimizer(changes: Sequence[Change]) -> None:
    """Raise if an optimizer's ``step`` changes Python objects outside its state."""
    for change in changes:
        raise CaptureError(
            f"the optimizer's step sets {change.where} from {_short(change.old)} to {_short(change.new)} in Python, "
            "which a captured step runs only while it is traced; keep it in the optimizer's state or a parameter group"
        )


@contextlib.contextmanager
def after(changes: Sequence[Change]) -> Iterator[None]:
    """Everything as the trace left it."""
    for change in changes:
        change.put(change.new)
    try:
        yield
    finally:
        for change in changes:
            change.put(change.old)


def keep(changes: Sequence[Change], of_model: bool = False) -> None:
    """Keep changes outside the model, with ``of_model`` inside it too, that no later step repeats: a cached length."""
    for change in changes:
        if not change.of_model or (of_model and not fake_inside(change.new)):
            change.put(change.new)


def same(first: StepProgram, second: StepProgram) -> bool:
    """Whether two traces recorded the same nodes and constants."""
    if first.text() != second.text():
        return False
    pairs = zip(first.graphs.values(), second.graphs.values(), strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(*map(_constants, (one, other)), strict=True))


def _constants(step: StepGraph) -> list[torch.Tensor]:
    held = (getattr(step.module, node.target) for node in step.graph.find_nodes(op="get_attr"))
    return [value for value in held if isinstance(value, torch.Tensor)]


def check(first: Sequence[Change], second: Sequence[Change], same: bool) -> None:
    """Raise if later steps differ from the first because of a change in forward; warn about counters, which may.

    ``first``: the changes of a trace. ``second``: those of a trace that began with their values. ``same``: whether both
    gave the same graph. A length that is kept, for example, changes once, and nothing with it.
    """
    again = {change.where for change in second}
    for change in first:
        where, old, new = change.where, change.old, change.new
        counts = type(new) in (int, float) and where in again
        if counts and not same:
            raise CaptureError(
                f"{where} counts in Python: {old} -> {new}; it would be frozen; register it as a buffer, or count "
                "outside forward"
            )
        if not same:
            raise CaptureError(
                f"forward sets {where} from {_short(old)} to {_short(new)} in Python and its next call differs; a "
                "captured step would repeat the first; call the model once before capture, or keep the state in a "
                "buffer"
            )
        if where in again and not change.of_model:
            raise CaptureError(
                f"the loss sets {where} from {_short(old)} to {_short(new)} in Python, and a captured step runs Python "
                "only while it is traced; set it outside, such as in a callback, or keep it in a buffer of the model"
            )
        if counts:
            warnings.warn(
                f"{where} counts in Python, and a captured step leaves it at {old}; if a later step is to depend on "
                "it, register it as a buffer",
                stacklevel=2,
            )


def _short(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    shown = kind_of(type(value)) in ("atom", "buffer") or isinstance(value, (list, dict))
    text = repr(value) if shown else type(value).__name__
    return text if len(text) <= 100 else f"{text[:97]}..."

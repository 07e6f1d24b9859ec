"""Plain attributes of modules that forward itself changes: a captured step would see their first values for ever."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stepgraph.capture.python.reads import PLAIN, Reads
from stepgraph.errors import CaptureError
from stepgraph.graph.program import StepProgram
from stepgraph.graph.step_graph import StepGraph

#: Module path and name of an attribute -> its value before forward, and after.
Changes = dict[tuple[str, str], tuple[Any, Any]]


class Writes:
    """Plain attributes as they are before forward."""

    def __init__(self, reads: Reads):
        self._reads = reads
        self._before = _plain(reads.model)

    def changes(self) -> Changes:
        """Those that were read since, and have another value now."""
        now = _plain(self._reads.model)
        modules = dict(self._reads.model.named_modules())
        return {
            (path, name): (old, now[path, name])
            for (path, name), old in self._before.items()
            if name in self._reads.names.get(id(modules.get(path)), ())
            and (path, name) in now
            and (type(old), repr(old)) != (type(now[path, name]), repr(now[path, name]))
        }


def _plain(model: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in PLAIN
    }


@contextlib.contextmanager
def after(model: nn.Module, changes: Changes) -> Iterator[None]:
    """The model as forward left it."""
    modules = dict(model.named_modules())
    for (path, name), (_, new) in changes.items():
        vars(modules[path])[name] = new
    try:
        yield
    finally:
        for (path, name), (old, _) in changes.items():
            vars(modules[path])[name] = old


def same(first: StepProgram, second: StepProgram) -> bool:
    """Whether two traces recorded the same nodes and constants."""
    if first.text() != second.text():
        return False
    pairs = zip(first.graphs.values(), second.graphs.values(), strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(*map(_constants, (one, other)), strict=True))


def _constants(step: StepGraph) -> list[torch.Tensor]:
    held = (getattr(step.module, node.target) for node in step.graph.find_nodes(op="get_attr"))
    return [value for value in held if isinstance(value, torch.Tensor)]


def check(first: Changes, second: Changes, same: bool) -> None:
    """Raise if later steps differ from the first by what forward changed; warn of counters, as they may some day.

    ``first``: the changes of a trace. ``second``: those of a trace that began with their values. ``same``: whether both
    gave the same graph. A length that is kept, for example, changes once, and nothing with it.
    """
    for (path, name), (old, new) in first.items():
        where = f"{path or 'model'}.{name}"
        counts = type(new) in (int, float) and (path, name) in second
        if counts and not same:
            raise CaptureError(
                f"{where} counts in Python: {old} -> {new}; it would be frozen; register it as a buffer, or count "
                "outside forward"
            )
        if not same:
            raise CaptureError(
                f"forward sets {where} from {old!r} to {new!r} in Python and its next call differs; a captured step "
                "would repeat the first; call the model once before capture, or keep the state in a buffer"
            )
        if counts:
            warnings.warn(
                f"{where} counts in Python, and a captured step leaves it at {old}; if a later step is to depend on "
                "it, register it as a buffer",
                stacklevel=2,
            )

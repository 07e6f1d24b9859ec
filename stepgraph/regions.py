"""`region`: names that a user's model gives to parts of its step.

Eager and ``torch.compile`` see nothing of them. A capture listens (`listening`), and its nodes carry the names open
when they are traced, backward nodes the regions of their forward node: see `stepgraph.graph.provenance`.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Traced(threading.local):
    """The names open on this thread, the outermost first; None where no capture listens."""

    names: list[str] | None = None


_traced = _Traced()


class _Region:
    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        if _traced.names is not None:
            _traced.names.append(self.name)

    def __exit__(self, *error: object) -> None:
        if _traced.names is not None:
            _traced.names.pop()


def region(name: str) -> contextlib.AbstractContextManager:
    """What the code inside ``with stepgraph.region(name):`` computes, and its backward, belongs to the region ``name``.

    Works wherever a captured step may run: in modules, in the loss, under ``torch.utils.checkpoint``, in forward and
    backward of an ``autograd.Function``. Regions nest: ``experts`` inside ``moe`` is ``moe/experts``. Outside a capture
    it does nothing. Under ``torch.compile`` it leaves no trace and breaks no graph.

    ``name``: letters, digits, ``_``, ``-`` and ``.``. Raises ``ValueError`` for any other.
    """
    if not isinstance(name, str) or not name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
        raise ValueError(f"region {name!r} is not a name: use letters, digits and '_-.', as in region('dispatch')")
    if torch.compiler.is_dynamo_compiling():
        # Dynamo carries torch's own context managers over a break of the graph, and gives up on a frame with others.
        return contextlib.nullcontext()
    return _Region(name)


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The names open on this thread, the outermost first, kept up to date; those open before do not count."""
    before, _traced.names = _traced.names, []
    try:
        yield _traced.names
    finally:
        _traced.names = before

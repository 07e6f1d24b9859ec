"""The host work of a captured step's call for an optimizer that is traced by its own ``step``."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.optimizer.tape import Tape
from stepgraph.capture.python import values
from stepgraph.capture.state import Wrapping, wrap

Tensor = torch.Tensor
#: What gives the current dictionary or list, and a key in it.
Place = tuple[Callable[[], Any], Any]


@dataclass
class Count:
    """A number, or a scalar tensor on the host, that several ``places`` hold alike; its ``place`` on the tape."""

    places: list[Place]
    place: int

    def agrees(self) -> bool:
        """Whether all places still hold the same."""
        first, *others = (holder()[key] for holder, key in self.places)
        return all(other is first or equal(first, other) for other in others)


@dataclass
class Wrapped:
    """A tensor of state that a step makes of its next ``count`` outputs, wrapped as ``wrapping`` says."""

    count: int
    wrapping: Wrapping | None

    def take(self, made: Iterator[Tensor]) -> Tensor:
        return wrap([next(made) for _ in range(self.count)], self.wrapping)


@dataclass
class Host:
    """The work of one form of a step. ``values``: inputs of the graph, by their places on the tape. ``writes``: what
    is written after the step, by the place on the tape. ``made``: state that this step makes: what gives the dict for
    it, its key, and its leaves, each a place on the tape or of the graph's next outputs, with their structure.
    ``options``: gives what the graph holds as constants; ``expected``: what that was; ``learn`` is called where it has
    changed. ``settle``: called before the first step, whether its state is right. ``outside``: scalar tensors of
    neither options nor state that the numbers follow from."""

    tape: Tape
    options: Callable[[], Any]
    expected: Any
    learn: Callable[[Any], None]
    counts: list[Count] = field(default_factory=list)
    values: list[tuple[int, Tensor]] = field(default_factory=list)
    writes: dict[int, list[Place]] = field(default_factory=dict)
    made: list[tuple[Callable[[], Any], Any, list[int | Wrapped], Any]] = field(default_factory=list)
    touched: list[Callable[[], Any]] = field(default_factory=list)
    state: Callable[[], tuple] = tuple
    form: tuple = ()
    settle: Callable[[], bool] | None = None
    outside: list[Tensor] = field(default_factory=list)
    _now: list | None = None

    def holds(self) -> bool:
        """Whether the graph is right for the current numbers and options; the numbers are computed."""
        self._now = None
        with contextlib.suppress(KeyError, IndexError):  # what it reads is no longer there
            self._now = self._numbers()
        return self._now is not None

    def _numbers(self) -> list | None:
        if not same(self.options(), self.expected):
            self.learn(self.expected)
        elif (self.settle is None or self.settle()) and same(self.state(), self.form):
            return self.tape.run() if all(count.agrees() for count in self.counts) else None
        return None

    def begin(self) -> None:
        """Fill the graph's inputs with the current numbers."""
        if self._now is None and not self.holds():
            raise RuntimeError("the optimizer's numbers changed between the choice of a graph and its run")
        for place, tensor in self.values:
            value = self._now[place]
            tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)

    def end(self, created: Iterator[Tensor], skipped: bool) -> None:
        """Write the numbers that the step changed, and the state that it made, of tensors ``created``; unless its
        update was left out."""
        for place, places in () if skipped else self.writes.items():
            value = self._now[place]
            live = [holder()[key] for holder, key in places] if isinstance(value, Tensor) else []
            if live:
                torch._foreach_copy_(live, [value] * len(live))
            else:
                for holder, key in places:
                    holder()[key] = value
        for holder, key, places, spec in self.made:
            leaves = [p.take(created) if isinstance(p, Wrapped) else _own(self._now[p]) for p in places]
            if not skipped:
                holder()[key] = compat.pytree.tree_unflatten(leaves, spec)
        for holder in () if skipped else self.touched:
            holder()
        self._now = self.settle = None


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def equal(a: Any, b: Any) -> bool:
    """Whether two numbers or scalar tensors are equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and bool(a == b)
    return values.equal(a, b)


def frozen(value: Any) -> Any:
    """A form of ``value`` that `same` compares later, although containers change."""
    if type(value) in (list, tuple):
        return tuple(map(frozen, value))
    if type(value) is dict:
        return (*value, *map(frozen, value.values()))
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two `frozen` values are of the same objects, or of equal numbers and texts."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, int | float | str | bytes | complex) and values.equal(a, b)

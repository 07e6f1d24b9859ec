"""Conditions that a step's update depends on, as code inside forward states them.

A *level* is an fp64 scalar that the graph computes; above 1 the step is unfit and its update is left out. A condition
may have a *repair*: what the host does with the level before it captures and runs the same step again. Without one, the
step is left out for good.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

Repair = Callable[[float], None]


class Conditions:
    """What forward stated while a step was traced: levels and repairs by the names of conditions."""

    def __init__(self) -> None:
        self.levels: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.repairs: dict[str, Repair] = {}

    def each(self) -> list[tuple[str, torch.Tensor]]:
        """(name, level) of everything that was stated."""
        return [(name, level) for name, found in self.levels.items() for level in found]

    def combined(self) -> dict[str, torch.Tensor]:
        """One level for each condition, the highest."""
        return {name: torch.stack(found).amax() for name, found in self.levels.items()}


_open: list[Conditions] = []


@contextlib.contextmanager
def collected() -> Iterator[Conditions]:
    """The conditions that are stated inside."""
    _open.append(Conditions())
    try:
        yield _open[-1]
    finally:
        _open.pop()


def collecting() -> bool:
    """Whether a trace collects conditions: otherwise code runs eagerly, and nothing would heed them."""
    return bool(_open)


def require(name: str, level: torch.Tensor, repair: Repair | None = None) -> None:
    """The update of the step that is being traced is left out where ``level``, an fp64 scalar, is above 1.

    ``repair``: called with the highest level of all ranks and of all that was stated under ``name``; the step is then
    captured and run again. To be called in forward, while a trace is `collecting`.
    """
    _open[-1].levels[name].append(level.detach())
    if repair is not None:
        _open[-1].repairs[name] = repair

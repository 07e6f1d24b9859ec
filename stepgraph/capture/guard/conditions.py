"""Conditions that a step's update depends on, as code inside forward states them.

A *ratio* is an fp64 scalar that the graph computes: of what the step needs to what it has. Above 1 the condition is
*exceeded* and the step's update is left out. A condition may be able to *grow*: a function that the host calls with the
ratio before it captures and runs the same step again. Otherwise the step is left out for good.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

Grow = Callable[[float], None]


class Conditions:
    """What forward stated while a step was traced, by the names of conditions: ratios, and functions that grow."""

    def __init__(self) -> None:
        self.ratios: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.grow: dict[str, Grow] = {}

    def each(self) -> list[tuple[str, torch.Tensor]]:
        """(name, ratio) of everything that was stated."""
        return [(name, ratio) for name, found in self.ratios.items() for ratio in found]

    def combined(self) -> dict[str, torch.Tensor]:
        """One ratio per condition: the highest."""
        return {name: torch.stack(found).amax() for name, found in self.ratios.items()}


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


def require(name: str, ratio: torch.Tensor, grow: Grow | None = None) -> None:
    """The update of the step that is being traced is left out where ``ratio``, an fp64 scalar, is above 1.

    ``grow``: called with the highest ratio of all ranks and of all that was stated under ``name``; the step is then
    captured and run again. To be called in forward, while a trace is `collecting`.
    """
    _open[-1].ratios[name].append(ratio.detach())
    if grow is not None:
        _open[-1].grow[name] = grow

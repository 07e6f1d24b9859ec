"""The rules that one compilation follows, and their part of Inductor's cache key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph import compat
from stepgraph.compat import compiler
from stepgraph.inductor.choices.fusion_guard import Guard
from stepgraph.inductor.choices.reduction_tuning import Tuning
from stepgraph.kernels.norm import column_sum

#: Files that decide what code is generated, and the operator that it calls.
_SOURCES = (*(str(path) for path in sorted(Path(__file__).parent.glob("*.py"))), compiler.__file__, column_sum.__file__)


@dataclass
class Rules:
    """What one compilation follows. ``key`` goes into Inductor's cache key: the settings and the sources."""

    guard: Guard | None = None
    tuning: Tuning | None = None

    def __or__(self, other: "Rules") -> "Rules":
        return Rules(other.guard or self.guard, other.tuning or self.tuning)

    def key(self) -> tuple[Any, ...]:
        return (
            compat.inductor().hash_of_files(_SOURCES),
            self.guard and self.guard.settings(),
            self.tuning and self.tuning.settings(),
        )

    def parts(self) -> list[Any]:
        return [part for part in (self.guard, self.tuning) if part is not None]

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any) -> bool:
        """Whether Inductor may fuse two nodes of its scheduler."""
        return (self.guard is None or self.guard.can_fuse(self.tuning, scheduler, node1, node2)) and (
            self.tuning is None or self.tuning.can_fuse(node1, node2)
        )

    def graphs(self) -> int:
        """Graphs compiled and cache keys made under these rules, so far."""
        return sum(part.graphs_compiled + part.graphs_seen for part in self.parts())

    def begin(self) -> None:
        """A graph is being compiled in this thread."""
        for part in self.parts():
            part.graphs_compiled += 1

    def seen(self) -> None:
        """A graph's cache key is being made: it will be compiled, or loaded."""
        for part in self.parts():
            part.graphs_seen += 1

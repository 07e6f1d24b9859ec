"""A pass's report on a graph, kept in the graph's log."""

import itertools
from dataclasses import dataclass, field
from typing import Literal, TypeGuard, TypeVar

from torch import fx

Match = TypeVar("Match")
Tier = Literal["exact", "numerics"]


@dataclass(frozen=True)
class Excerpt:
    """One of ``count`` changes of the same form. ``before``, ``after``: lines as in the graph's text, both in the
    graph's order; readers that only read another node now are among them. ``where``: the module that it is in.
    ``moved``: nothing is another node, only the order changed."""

    count: int
    where: str
    before: list[str]
    after: list[str]
    moved: bool = False


@dataclass
class PassReport:
    """What one pass did.

    ``matched`` and ``changed`` count what the pass looks for (its ``summary`` says what). ``notes``: anything a
    reader should know. ``skipped``: why it did not run, or None. ``apply_s``: seconds the pass itself ran;
    ``compile_s``: seconds on top of that, spent in a compiler, or at the first steps in recording CUDA graphs.
    ``nodes_before``, ``nodes_after``: operator nodes of the graph. ``terminal``: what runs is no longer the graph, so
    no pass may follow in another run of passes. ``graph``: which of a step's graphs it was. ``excerpts``: of what it
    changed, before and after. ``peak``: bytes at the graph's peak as `fit_memory` counts them. ``peak_curve``: (bytes
    at the step's peak, seconds that it costs), from where all is kept to the least. ``peak_chosen``: the same of what
    was chosen. ``added_s``: seconds that a step takes longer (below 0: less) by the copies of the pass, as forecast.
    """

    name: str
    tier: Tier
    summary: str = ""
    matched: int = 0
    changed: int = 0
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None
    apply_s: float = 0.0
    compile_s: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    terminal: bool = False
    graph: str = ""
    excerpts: list[Excerpt] = field(default_factory=list)
    peak: int = 0
    peak_curve: list[tuple[int, float]] = field(default_factory=list)
    peak_chosen: tuple[int, float] | None = None
    added_s: float = 0.0

    @property
    def acted(self) -> bool:
        """Whether the pass changed the step."""
        return self.skipped is None and bool(self.changed or self.compile_s or self.nodes_after != self.nodes_before)

    def takes(self, found: Match | str, node: fx.Node) -> TypeGuard[Match]:
        """Count what was ``found`` around ``node`` as matched and, where it is no reason to leave it, as changed."""
        self.matched += 1
        if isinstance(found, str):
            self.notes.append(f"{node.name} is left unchanged: {found}")
            return False
        self.changed += 1
        return True

    def line(self) -> str:
        """The report in one line."""
        if self.skipped:
            return f"{self.name} [{self.tier}]: skipped, {self.skipped}"
        delta = self.nodes_after - self.nodes_before
        did = self.summary or f"{self.changed} of {self.matched} changed"
        if not self.matched:
            did = "found nothing to do"
        text = f"{self.name} [{self.tier}]: {did}; nodes {self.nodes_after} ({delta:+d}); {self.apply_s:.2f} s"
        return text + (f", compile {self.compile_s:.2f} s" if self.compile_s else "")


class PassReports(list[PassReport]):
    """Reports of passes, graph by graph; printed, they are numbered lines with each pass's notes indented below it."""

    def __str__(self) -> str:
        lines, several = [], len({report.graph for report in self}) > 1
        for graph, group in itertools.groupby(self, key=lambda report: report.graph):
            lines += [f"graph of the {graph}:"] if several else []
            for i, report in enumerate(group, 1):
                lines += [f"{i}. {report.line()}", *(f"   {note}" for note in report.notes)]
        return "\n".join(lines)

"""The contract of a pass: the facts it declares, the report it returns, and the register of all passes."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from stepgraph.errors import unknown_name
from stepgraph.graph.step_graph import StepGraph

Tier = Literal["exact", "numerics"]


@dataclass
class PassReport:
    """What one pass did.

    ``matched`` and ``changed`` count what the pass looks for (its ``summary`` says what). ``notes``: anything a
    reader should know. ``skipped``: why it did not run, or None. ``apply_s``: seconds the pass itself ran;
    ``compile_s``: seconds besides, spent in a compiler, or at the first steps in recording CUDA graphs.
    ``nodes_before``, ``nodes_after``: operator nodes of the graph. ``terminal``: what runs is no longer the graph, so
    that no pass may follow in another run of passes. ``graph``: which of a step's graphs it was.
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


@dataclass(frozen=True)
class Pass:
    """A pass and its declared facts.

    ``apply(step, options, report)`` rewrites the graph in place and fills the report. ``tier``: ``exact`` leaves
    every result bitwise equal to eager, ``numerics`` may round differently. ``requires``, ``provides``: properties
    of the graph that must hold before, and hold after. ``terminal``: only terminal passes may follow. ``options``:
    dataclass of the pass's options. ``optional``: where it cannot run it is skipped, with its reason in the report;
    the pipelines' passes are, those that a caller names are not. ``prepare(device)``: called before a step on that
    device is traced, for what takes its time beside the tracing.
    """

    name: str
    tier: Tier
    apply: Callable[[StepGraph, Any, PassReport], None]
    doc: str
    options: Any
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    terminal: bool = False
    min_torch: tuple[int, int] = (2, 11)
    needs_cuda: bool = False
    needs_process_group: bool = False
    optional: bool = False
    prepare: Callable[[torch.device], None] | None = None

    def with_options(self, **values: Any) -> "Pass":
        """The pass with some of its options set. ``ValueError`` names an option that does not exist."""
        known = {f.name for f in fields(self.options)}
        for name in values:
            if name not in known:
                raise unknown_name(f"option of pass {self.name}", name, known)
        return replace(self, options=replace(self.options, **values))


@dataclass(frozen=True)
class NoOptions:
    """For passes that have none."""


PASSES: dict[str, Pass] = {}


def register(name: str, tier: Tier, options: Any = None, **facts: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function as the pass ``name``; its docstring's first line is its description."""

    def decorate(apply: Callable) -> Callable:
        doc = (apply.__doc__ or "").strip().splitlines()[0]
        PASSES[name] = Pass(name, tier, apply, doc, options if options is not None else NoOptions(), **facts)
        return apply

    return decorate


def get(name: str, **options: Any) -> Pass:
    """The pass ``name`` with ``options``; an unknown name is refused with the nearest one."""
    if name not in PASSES:
        raise unknown_name("pass", name, PASSES)
    return PASSES[name].with_options(**options)

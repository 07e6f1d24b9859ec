"""The contract of a pass: the facts it declares, the report it returns, and the register of all passes."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from stepgraph.errors import unknown_name
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.excerpts import Excerpt
from stepgraph.passes.target import Target

Tier = Literal["exact", "numerics"]


@dataclass
class PassReport:
    """What one pass did.

    ``matched`` and ``changed`` count what the pass looks for (its ``summary`` says what). ``notes``: anything a
    reader should know. ``skipped``: why it did not run, or None. ``apply_s``: seconds the pass itself ran;
    ``compile_s``: seconds on top of that, spent in a compiler, or at the first steps in recording CUDA graphs.
    ``nodes_before``, ``nodes_after``: operator nodes of the graph.
    ``terminal``: what runs is no longer the graph, so no pass may follow in another run of passes. ``graph``: which
    of a step's graphs it was. ``excerpts``: of what it changed, before and after.
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

    @property
    def acted(self) -> bool:
        """Whether the pass changed the step."""
        return self.skipped is None and bool(self.changed or self.compile_s or self.nodes_after != self.nodes_before)

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

    What it does:
        ``apply(step, options, report)`` rewrites the graph in place and fills the report; ``options``: a dataclass.
        ``tier``: ``exact`` leaves every result bitwise equal to eager, ``numerics`` may round differently.
    When it may run:
        ``after``: passes that must come before it where both run. ``terminal``: only terminal passes may follow.
        ``serves``: the later pass without which this one is of no use. ``needs_cuda``, ``needs_process_group``: what it
        needs of the target. ``optional``: where it cannot run it is skipped, with its reason in the report, and without
        the pass it serves it is left out; so are those that `order.chosen` gives, not those a caller names.
    How it is set:
        ``from_options(step_options)``: its own options for a run's `StepOptions`, None where those leave it out.
        ``for_target(options, target)``: its options, completed with what the target says.
        ``forecast``: whether a forecast runs it too; False where it decides nothing but kernels.
        ``prepare(target)``: called before a step for ``target`` is traced, for work that can be done meanwhile.
    """

    name: str
    tier: Tier
    apply: Callable[[StepGraph, Any, PassReport], None]
    doc: str
    options: Any
    after: tuple[str, ...] = ()
    terminal: bool = False
    serves: str | None = None
    needs_cuda: bool = False
    needs_process_group: bool = False
    optional: bool = False
    from_options: Callable[[Any], dict[str, Any] | None] = lambda step_options: {}
    for_target: Callable[[Any, Target], Any] = lambda options, target: options
    forecast: bool = True
    prepare: Callable[[Target], None] | None = None

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

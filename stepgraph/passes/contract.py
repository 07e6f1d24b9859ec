"""The contract of a pass: the facts it declares, and the register of all passes."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from stepgraph.errors import unknown_name
from stepgraph.graph.report import PassReport, Tier
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.target import Target


@dataclass(frozen=True)
class Pass:
    """A pass and its declared facts.

    What it does:
        ``apply(step, options, report)`` rewrites the graph in place and fills the report; ``options``: a dataclass.
        ``tier``: ``exact`` leaves every result bitwise equal to eager, ``numerics`` may round differently.
    When it may run:
        ``after``: passes that must come before it where both run. ``terminal``: only terminal passes may follow.
        ``serves``: the later pass without which this one is useless. ``needs_cuda``, ``needs_process_group``: what it
        needs of the target. ``optional``: where it cannot run it is skipped, with its reason in the report, and without
        the pass it serves it is left out. The passes of `order.chosen` are optional, the ones that a caller names are
        not.
    How it is set:
        ``from_options(step_options)``: its own options for a run's `StepOptions`, None where those leave it out.
        ``for_target(options, target)``: its options, completed from the target.
        ``forecast``: whether a forecast runs it too; False where it decides nothing but kernels.
        ``communicates``: whether it moves communication; its report then compares the exposed seconds before and after.
        ``prepare(target)``: called before a step for ``target`` is traced, for work that can be done at the same time.
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
    communicates: bool = False
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
        doc = ((apply.__doc__ or "").strip().splitlines() or [""])[0]  # -OO has none
        PASSES[name] = Pass(name, tier, apply, doc, options if options is not None else NoOptions(), **facts)
        return apply

    return decorate


def get(name: str, **options: Any) -> Pass:
    """The pass ``name`` with ``options``; an unknown name is refused with the nearest one."""
    if name not in PASSES:
        raise unknown_name("pass", name, PASSES)
    return PASSES[name].with_options(**options)

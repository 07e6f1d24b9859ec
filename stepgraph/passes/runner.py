"""Runs passes: checks their contracts first, then applies, lints, times and reports each."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.costs.timeline import exposed, exposed_text
from stepgraph.errors import TraceError, first_line
from stepgraph.graph.report import PassReports
from stepgraph.options import StepOptions
from stepgraph.passes.contract import Pass, PassReport, StepGraph, Target, get
from stepgraph.passes.excerpts import Changes
from stepgraph.passes.order import NAMED, ORDER, chosen
from stepgraph.passes.verify import RecordedValues

#: Names each pass before it runs.
log = logging.getLogger("stepgraph.passes")

#: What a caller may give: a name of a ready-made list, options of a step, or a list of names and configured passes.
Passes = str | StepOptions | Iterable[str | Pass]

#: Up to which share of labels that count products of these rows alone, at 85% of the speed, are clearly faster.
_FEW = 2 / 3


def resolve(passes: Passes, disable: Sequence[str], target: Target) -> list[Pass]:
    """The passes to run on ``target``, in order, with its facts."""
    if isinstance(passes, StepOptions):
        found = chosen(passes)
    elif isinstance(passes, Iterable) and not isinstance(passes, str):
        found = [p if isinstance(p, Pass) else get(p) for p in passes]
    elif isinstance(passes, str) and passes in NAMED:
        found = chosen(StepOptions(passes))
    else:
        raise ValueError(f"unknown passes {passes!r}; allowed: {', '.join(map(repr, NAMED))}, StepOptions or a list")
    for name in disable:
        get(name)  # refuses an unknown name
    # No others: a list may be one part of the choice, and the passes that need them may be in a later part.
    found = [p for p in found if p.name not in disable and not (p.optional and p.serves in disable)]
    found = [p for p in found if p.forecast or not target.simulated]
    return [replace(p, options=p.for_target(p.options, target)) for p in found]


def for_labels(passes: Passes, share: Callable[[], float]) -> Passes:
    """``passes`` of a step whose first batch has this ``share`` of labels that count: ``loss_rows`` for auto. Ranks,
    whose graphs must be alike, do not look at theirs."""
    options = StepOptions() if passes == "default" else passes
    if not isinstance(options, StepOptions) or options.passes == "exact" or options.loss_rows != "auto":
        return passes
    return passes if dist.is_initialized() or share() > _FEW else replace(options, loss_rows="counted")


def prepare(passes: Passes, disable: Sequence[str], target: Target) -> None:
    """What ``passes`` begin before a step for ``target`` is traced. Raises ``ValueError`` as `run_passes` does."""
    found = resolve(passes, disable, target)
    check(found)
    for p in found:
        if p.prepare is not None:
            p.prepare(target)


def split_at_pipeline_cut(passes: Passes, disable: Sequence[str], target: Target) -> tuple[list[Pass], list[Pass]]:
    """``passes`` on ``target`` for a stage of a pipeline: (the passes that run on its forward and backward together,
    the passes that run on each of the graphs that it is then cut into)."""
    found = resolve(passes, disable, target)
    check(found)
    late = ORDER.index("overlap")  # what it moves must stay in the graph that is called
    at = next((i for i, p in enumerate(found) if p.name in ORDER[late:]), len(found))
    return found[:at], found[at:]


def dry_run(passes: Passes, disable: Sequence[str], target: Target) -> list[Pass] | None:
    """``passes`` up to a compiler that serves any length of a batch, which compiles nothing and only notes what depends
    on the length; None without such a compiler."""
    found = resolve(passes, disable, target)
    at = next((i for i, p in enumerate(found) if getattr(p.options, "any_length", False)), None)
    return None if at is None else [*found[:at], found[at].with_options(dry_run=True)]


def check(passes: Sequence[Pass]) -> None:
    """Raise ``ValueError`` if the order breaks a contract."""
    terminal: Pass | None = None
    seen: set[str] = set()
    late = {name: p.name for p in reversed(passes) for name in p.after}  # pass -> the first that must come after it
    for p in passes:
        if p.name in seen:
            raise ValueError(f"pass {p.name} is listed twice; list it once")
        if late.get(p.name) in seen:
            raise ValueError(f"pass {late[p.name]} must come after {p.name}; list it later")
        seen.add(p.name)
        if terminal and not p.terminal:
            raise ValueError(f"pass {p.name} cannot run after {terminal.name}, which is terminal; put it before")
        terminal = p if p.terminal else terminal


def unusable(p: Pass, target: Target) -> str | None:
    """Why the pass cannot run on ``target``, or None."""
    if p.needs_cuda and target.device != "cuda":
        return "the step has no CUDA tensors"
    if p.needs_process_group and not target.process_groups:
        return "no process group is initialized"
    return None


def run_passes(
    step: StepGraph,
    passes: Passes = "default",
    *,
    disable: Sequence[str] = (),
    dump: Path | None = None,
    target: Target | None = None,
) -> list[PassReport]:
    """Apply ``passes`` to ``step`` in order; reports go to ``step.log`` and are returned.

    ``dump``: folder for the graph's text before the first pass and after each one. ``target``: what the step is to run
    on; None: where its tensors are. Raises ``ValueError`` for unknown names and broken contracts before anything is
    changed.
    """
    target = target or Target.of(step)
    found = resolve(passes, disable, target)
    check(found)
    done = next((report.name for report in step.log if report.terminal), None)
    if found and done:
        raise ValueError(f"pass {done}, which is terminal, has run on this step already; capture the step again")
    reports = [PassReport(p.name, p.tier, skipped=unusable(p, target)) for p in found]
    for p, report in zip(found, reports, strict=True):
        if report.skipped and not p.optional:
            raise ValueError(f"pass {p.name} cannot run: {report.skipped}; leave it out")
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        if not step.log:
            (dump / "00-captured.txt").write_text(step.text())
    values, changes, communication = RecordedValues(step), Changes(step), None
    with compat.collector_off(), compat.names_of_copies():
        for i, (p, report) in enumerate(zip(found, reports, strict=True), 1 + len(step.log)):
            communication = _run(p, step, report, changes, communication)
            if report.skipped is None:
                values.check(p.name, changes.touched)
            if dump is not None:
                (dump / f"{i:02d}-{p.name}.txt").write_text(step.text())
    step.graph.lint()  # the order again, and what no call of a node shows, such as names
    if step.executable is step.module:  # else it is only read, and compiling its code would be wasted
        step.module.recompile()
    return list(step.log)


def _run(
    p: Pass, step: StepGraph, report: PassReport, changes: Changes, communication: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Apply one pass, unless there is a reason to skip it, and add its report to the step's. ``communication``: what
    `exposed` gives of the graph as it is, None if that is not known; likewise what is returned."""
    report.nodes_before = step.node_count
    changed = False
    if report.skipped is None:
        log.info("pass %s", p.name)
        start = time.perf_counter()
        with _explained(p):
            if p.communicates and communication is None:
                communication = exposed(step.graph)
            p.apply(step, p.options, report)
            if changed := changes.changed():
                _check_order(step.graph)
                before, communication = communication, exposed(step.graph) if p.communicates else None
                if before and communication:
                    report.notes.append(exposed_text(before, communication))
        report.apply_s = time.perf_counter() - start - report.compile_s
        report.excerpts = changes.excerpts() if changed else []
    if report.skipped is None:  # a pass may find out itself that it cannot run
        report.terminal = p.terminal
    report.nodes_after = step.node_count if changed else report.nodes_before
    step.log.append(report)
    return communication


def _check_order(graph: fx.Graph) -> None:
    """Raise for a node that reads what comes later or has left the graph."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            source = next(source for source in node.all_input_nodes if source not in seen)
            raise RuntimeError(f"node {node.name} reads {source.name} before it is made, or from outside the graph")
        seen.add(node)


@contextlib.contextmanager
def _explained(p: Pass) -> Iterator[None]:
    """Raise a failure inside as one line with a fix. Refused options and out-of-memory errors pass unchanged."""
    try:
        yield
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        off = f"disable=({p.name!r},)" + ' or StepOptions(inductor="off")' * (p.name == "inductor")
        raise TraceError(
            f"pass {p.name} fails on this step: {type(error).__name__}: {first_line(error)}; leave it out by {off}"
        ) from error


def asked_for(options: StepOptions, plain: StepOptions, device: str) -> set[str]:
    """Names of the passes that run on ``device`` because ``options`` say other than ``plain``, or run otherwise."""
    target = Target(device)
    usual = resolve(plain, (), target)
    return {p.name for p in resolve(options, (), target) if p not in usual}


def format_report(reports: Sequence[PassReport]) -> str:
    """The numbered pass report, graph by graph where a step has several, with notes indented below each pass."""
    return str(PassReports(reports))

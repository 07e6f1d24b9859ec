"""Runs passes: checks their contracts first, then applies, lints, times and reports each."""

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PASSES, Pass, PassReport, get
from stepgraph.passes.order import PIPELINES
from stepgraph.passes.verify import RecordedValues


def resolve(passes: str | Iterable[str | Pass], disable: Sequence[str] = ()) -> list[Pass]:
    """The passes to run.

    ``passes``: ``"exact"``, ``"default"``, or a list of names and configured passes.
    """
    if not isinstance(passes, str):
        chosen = [p if isinstance(p, Pass) else get(p) for p in passes]
    elif passes in PIPELINES:
        chosen = PIPELINES[passes]()
    else:
        raise ValueError(f"unknown pipeline {passes!r}; allowed: {', '.join(map(repr, PIPELINES))} or a list of passes")
    for name in disable:
        get(name)  # refuses an unknown name
    return [p for p in chosen if p.name not in disable]


def prepare(passes: str | Iterable[str | Pass], disable: Sequence[str], device: torch.device) -> None:
    """What ``passes`` start before a step on ``device`` is traced. Raises ``ValueError`` as `run_passes` does."""
    chosen = resolve(passes, disable)
    check(chosen)
    for p in chosen:
        if p.prepare is not None:
            p.prepare(device)


def check(passes: Sequence[Pass]) -> None:
    """Raise ``ValueError`` if the order breaks a contract."""
    have: set[str] = set()
    terminal: Pass | None = None
    seen: set[str] = set()
    for p in passes:
        if p.name in seen:
            raise ValueError(f"pass {p.name} is listed twice; list it once")
        seen.add(p.name)
        if terminal and not p.terminal:
            raise ValueError(f"pass {p.name} cannot run after {terminal.name}, which is terminal; put it before")
        missing = [r for r in p.requires if r not in have]
        if missing:
            givers = [q.name for q in PASSES.values() if missing[0] in q.provides]
            raise ValueError(f"pass {p.name} requires {missing[0]!r}; put {' or '.join(givers)} before it")
        have |= set(p.provides)
        terminal = p if p.terminal else terminal


def unusable(p: Pass, step: StepGraph) -> str | None:
    """Why the pass cannot run here, or None."""
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    if version < p.min_torch:
        return f"needs torch {p.min_torch[0]}.{p.min_torch[1]} or newer, this is {torch.__version__}"
    if p.needs_cuda and not any(n.meta["val"].is_cuda for n in step.placeholders()):
        return "the step has no CUDA tensors"
    if p.needs_process_group and not torch.distributed.is_initialized():
        return "no process group is initialized"
    return None


def run_passes(
    step: StepGraph,
    passes: str | Iterable[str | Pass] = "default",
    *,
    disable: Sequence[str] = (),
    dump: Path | None = None,
) -> list[PassReport]:
    """Apply ``passes`` to ``step`` in order; reports go to ``step.log`` and are returned.

    ``dump``: folder for the graph's text before the first pass and after each one. Raises ``ValueError`` for unknown
    names and broken contracts before anything is changed.
    """
    chosen = resolve(passes, disable)
    check(chosen)
    done = next((report.name for report in step.log if report.terminal), None)
    if chosen and done:
        raise ValueError(f"pass {done}, which is terminal, has run on this step already; capture the step again")
    skipped = {p.name: unusable(p, step) for p in chosen}
    for p in chosen:
        if skipped[p.name] and not p.optional:
            raise ValueError(f"pass {p.name} cannot run: {skipped[p.name]}; leave it out")
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "00-captured.txt").write_text(step.text())
    provided: set[str] = set()
    values = RecordedValues(step)
    for i, p in enumerate(chosen, 1):
        report = PassReport(p.name, p.tier, nodes_before=sum(1 for _ in step.nodes()), skipped=skipped[p.name])
        missing = [r for r in p.requires if r not in provided]
        if missing:
            report.skipped = report.skipped or f"the pass that provides {missing[0]!r} was skipped"
        if report.skipped is None:
            start = time.perf_counter()
            p.apply(step, p.options, report)
            step.graph.lint()
            report.apply_s = time.perf_counter() - start - report.compile_s
            values.check(p.name)
        if report.skipped is None:  # a pass may find out itself that it cannot run
            provided |= set(p.provides)
            report.terminal = p.terminal
        report.nodes_after = sum(1 for _ in step.nodes())
        step.log.append(report)
        if dump is not None:
            (dump / f"{i:02d}-{p.name}.txt").write_text(step.text())
    if step.executable is step.module:  # else it is there to be read, and its code would be compiled for nobody
        step.module.recompile()
    return list(step.log)


def format_report(reports: Sequence[PassReport]) -> str:
    """The numbered pass report, graph by graph where a step has several, with notes indented below each pass."""
    lines, several = [], len({report.graph for report in reports}) > 1
    for graph, group in itertools.groupby(reports, key=lambda report: report.graph):
        lines += [f"graph of the {graph}:"] if several else []
        for i, report in enumerate(group, 1):
            lines.append(f"{i}. {report.line()}")
            lines += [f"   {note}" for note in report.notes]
    return "\n".join(lines)

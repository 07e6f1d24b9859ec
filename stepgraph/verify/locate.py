"""Where a captured step and eager part first.

First the graph as it was captured is run node by node, beside the operators that eager runs. If they agree, the passes
are added one by one, each time from a capture of its own, until a result is no longer eager's.
"""

import os
from collections.abc import Sequence

import torch
from torch import fx

from stepgraph.capture import trace_step
from stepgraph.graph.facts import is_view
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.kernels.comm.exchange import Session
from stepgraph.passes import Pass, Target, resolve, run_passes
from stepgraph.run import Accumulators, BoundStep
from stepgraph.verify.case import Case, calls, differ, outcome
from stepgraph.verify.fingerprints import EagerResults, Fingerprint, NodeResults
from stepgraph.verify.state import Key, Snapshot

#: Phases whose values eager has too; an update may compute the same in other operators.
_SHARED = ("forward", "loss", "backward")


def where_they_part(case: Case, snapshot: Snapshot, eager: dict[Key, torch.Tensor]) -> str:
    """The first node, or the first pass, that gives what eager, with the outcome ``eager``, does not; in words."""
    snapshot.restore()
    with EagerResults() as operators:
        case.eager()
    seen = operators.seen
    program, found, results = _attempt(case, snapshot, [])
    if differ(eager, results):
        return f"they part in the capture itself, before any pass: {_first(found, seen, 'eager')}"
    chain = resolve(case.passes, case.disable, Target.of(program.main))
    skipped = _skipped(case.bound.traced.program)
    for k, p in enumerate(chain, 1):
        if p.name in skipped:
            continue
        before = {value for _, values in found for value in values}
        _, found, results = _attempt(case, snapshot, chain[:k])
        if differ(eager, results):
            first = _first(found, before | seen, "the graph before it") if found else "it runs compiled, in no order"
            return f"they part with the pass {p.name} ({p.tier}): {first}"
    return "captured again, the step equals eager: what Python read, such as a global, has changed since the capture"


def _attempt(
    case: Case, snapshot: Snapshot, passes: Sequence[Pass]
) -> tuple[StepProgram, list[tuple[fx.Node, list[Fingerprint]]], dict[Key, torch.Tensor]]:
    """A capture of its own with ``passes``, run from the snapshot: (program, results of its nodes, outcome).

    What a compiler made of a graph is run as it is, and its nodes have no results.
    """
    snapshot.restore()
    options = {key: getattr(case, key) for key in ("max_grad_norm", "accumulate", "skip_nonfinite")}
    traced = trace_step(case.model, case.loss_fn, case.batch, case.optimizer, **options)
    for graph in traced.program.graphs.values():
        run_passes(graph, list(passes))
    bound = BoundStep(traced, case.bound.update, Session(), Accumulators())
    watched = []
    for name, graph in traced.program.graphs.items():
        if graph.executable is graph.module and graph.recording is None:
            bound.runner.runners[name] = NodeResults(graph.module)
            watched.append(bound.runner.runners[name])
    results = {}
    for _ in range(calls(traced.program)):
        snapshot.restore()
        results = outcome(case, lambda: bound(case.leaves))
    return traced.program, [pair for runner in watched for pair in runner.found], results


def _skipped(program: StepProgram) -> set[str]:
    """Passes that did nothing to any graph of ``program``."""
    reports = [report for graph in program.graphs.values() for report in graph.log]
    ran = {report.name for report in reports if report.skipped is None}
    return {report.name for report in reports} - ran


def _first(found: list[tuple[fx.Node, list[Fingerprint]]], seen: set[Fingerprint], whose: str) -> str:
    """The first node with a result that is not among those ``seen``."""
    for node, values in found:
        if phase_of(node) in _SHARED and not is_view(node) and not seen.issuperset(values):
            return f"the first value that {whose} does not have is {_described(node)}"
    return "forward and backward give the same values, the update does not"


def _described(node: fx.Node) -> str:
    where = provenance(node)
    file, _, line = where.source.rpartition(":")
    return (
        f"{node.name} = {node.target}, {where.phase} of {where.path or 'the model'} ({os.path.basename(file)}:{line})"
    )

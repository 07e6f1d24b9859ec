"""Compares a captured step with eager, and finds where it first differs.

The graph as it was captured is first run node by node, next to the operators that eager runs. If they agree,
the passes are added one by one, each time to a copy of that graph, until a result is no longer eager's.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture import Traced
from stepgraph.graph.facts import is_view, leaves_rest
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.kernels.comm.exchange import Session
from stepgraph.lower import copied, rewrite, trace
from stepgraph.passes import Pass, Target, resolve
from stepgraph.run.bound import BoundStep
from stepgraph.run.interpreter import Interpreter
from stepgraph.run.memory import Memory
from stepgraph.verify.case import Case, calls, differ, outcome, tolerance
from stepgraph.verify.state import KINDS, Key, Snapshot, VerifyReport, differences

#: Shape, dtype, and a sum over the content's bytes.
Fingerprint = tuple[tuple[int, ...], torch.dtype, int]

#: Elements that are read at once: they are widened to 8 bytes each.
_CHUNK = 1 << 22

#: Memory without values.
_UNSET = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """A number that differs, except for one chance in 2^64 or so, where one bit of ``tensor`` does."""
    total = 0
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel():
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        flat = flat.view(_INTEGERS[flat.element_size()])
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].long()
            places = torch.arange(start, start + part.numel(), device=part.device)
            mixed = (part + 0x632BE59BD9B4E019) * (2 * places + 1)
            total = (total * 31 + int((mixed ^ (mixed >> 29)).sum())) % (1 << 64)
    return tuple(tensor.shape), tensor.dtype, total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_values(target: Any) -> bool:
    """Whether what an operator gives is set when it returns: not by ``empty``, nor by a collective before its wait."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    namespace, name = target._schema.name.split("::")
    return name not in _UNSET and (not namespace.startswith("_c10d_functional") or name == "wait_tensor")


class EagerResults(compat.TorchDispatchMode):
    """While active, ``seen`` collects the fingerprints of every operator's results and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Fingerprint] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: its local operators come next
        result = func(*args, **dict(kwargs or {}))
        if has_values(func):
            self.seen.update(fingerprint(t) for t in _tensors(result) if not compat.is_fake(t))
        return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in compat.pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class NodeResults(Interpreter):
    """Runs a graph node by node; ``found``: each node with the fingerprints of its results, in order."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: list[tuple[fx.Node, list[Fingerprint]]] = []

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        result = super()._run(node, env)
        if has_values(node.target) and not leaves_rest(node):
            self.found.append((node, [fingerprint(t) for t in _tensors(result)]))
        return result


#: Phases whose values eager has too; an update may compute the same in other operators.
_SHARED = ("forward", "loss", "backward")


def where_they_differ(case: Case, snapshot: Snapshot, eager: dict[Key, torch.Tensor]) -> str:
    """The first node, or the first pass, that gives what eager, with the outcome ``eager``, does not; in words."""
    snapshot.restore()
    with EagerResults() as operators:
        case.eager()
    seen = operators.seen
    snapshot.restore()
    traced = trace(case.spec)
    found, results = _attempt(case, traced, snapshot, [])
    if differ(eager, results):
        kinds = {one.kind for one in differences(eager, results)}
        return f"they differ in the capture itself, before any pass: {_first(found, seen, 'eager', kinds)}"
    chain = resolve(case.spec.passes, case.spec.disable, Target.of(traced.step))
    skipped = _skipped(case.bound.traced.program)
    for k, p in enumerate(chain, 1):
        if p.name in skipped:
            continue
        before = {value for _, values in found for value in values}
        found, results = _attempt(case, traced, snapshot, chain[:k])
        if differ(eager, results):
            kinds, seen = {one.kind for one in differences(eager, results)}, before | seen
            first = _first(found, seen, "the graph before it", kinds) if found else "it runs compiled, in no order"
            return f"they differ with the pass {p.name} ({p.tier}): {first}"
    return "captured again, the step equals eager: what Python read, such as a global, has changed since the capture"


def _attempt(
    case: Case, traced: Traced, snapshot: Snapshot, passes: Sequence[Pass]
) -> tuple[list[tuple[fx.Node, list[Fingerprint]]], dict[Key, torch.Tensor]]:
    """The step as ``traced``, rewritten by ``passes`` and run from the snapshot: (results of its nodes, outcome).

    What a compiler made of a graph is run as it is, and its nodes have no results.
    """
    program = rewrite(copied(traced.program), dataclasses.replace(case.spec, passes=passes, disable=()))
    bound = BoundStep(dataclasses.replace(traced, program=program), case.bound.update, Session(), Memory())
    plain = {name: g.module for name, g in program.graphs.items() if g.executable is g.module and g.recording is None}
    watched = {name: NodeResults(module) for name, module in plain.items()}
    bound.runner.runners.update(watched)
    results = {}
    for _ in range(calls(program)):
        snapshot.restore()
        results = outcome(case, lambda: bound(case.leaves))
    return [pair for runner in watched.values() for pair in runner.found], results


def _skipped(program: StepProgram) -> set[str]:
    """Passes that did nothing to any graph of ``program``."""
    reports = [report for graph in program.graphs.values() for report in graph.log]
    ran = {report.name for report in reports if report.skipped is None}
    return {report.name for report in reports} - ran


def _first(found: list[tuple[fx.Node, list[Fingerprint]]], seen: set[Fingerprint], whose: str, kinds: set[str]) -> str:
    """The first node with a result that is not among those ``seen``. ``kinds``: of what the step leaves otherwise."""
    for node, values in found:
        if phase_of(node) in _SHARED and not is_view(node) and not seen.issuperset(values):
            return f"the first value that {whose} does not have is {_described(node)}"
    if not kinds & {"loss", "gradient"} and any(phase_of(node) == "optimizer" for node, _ in found):
        return "forward and backward give the same values, the update does not"
    return f"every value of forward and backward is one that {whose} has too, and what the step leaves is not"


def _described(node: fx.Node) -> str:
    where = provenance(node)
    file, _, line = where.source.rpartition(":")
    place = f"{where.path or 'the model'} ({os.path.basename(file)}:{line})"
    return f"{node.name} = {node.target}, {where.phase} of {place}"


def verify(case: Case, locate: bool) -> VerifyReport:
    """Compare the step of ``case`` with eager; everything that they change is restored.

    ``locate``: if they differ, look for the first node or pass that differs: captures again, up to once for each pass.
    """
    snapshot = Snapshot(case.state)
    try:
        eager = outcome(case, case.eager)
        captured = {}
        for _ in range(calls(case.bound.traced.program)):
            snapshot.restore()
            captured = outcome(case, lambda: case.bound(case.leaves))
        found = differences(eager, captured)
        report = VerifyReport(
            loss=(float(eager["loss", "loss"]), float(captured["loss", "loss"])),
            compared={kind: sum(key[0] == kind for key in eager) for kind in KINDS},
            differences=tuple(found),
            tolerance=tolerance(case.bound.traced.program),
        )
        if not differ(eager, captured):
            return report
        snapshot.restore()
        if differ(eager, outcome(case, case.eager)):
            return dataclasses.replace(report, repeats=False)
        if locate:
            report = dataclasses.replace(report, parted=where_they_differ(case, snapshot, eager))
        return report
    finally:
        snapshot.restore()

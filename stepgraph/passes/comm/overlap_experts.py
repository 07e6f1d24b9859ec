"""Lets experts' tokens travel while other experts compute; only the graph's order changes.

Matches: collectives that dispatch tokens to experts and combine their results, in forward, backward and recomputation.
Before -> after, for a layer with a shared expert whose tokens go in two halves (``expert_chunks=2`` of `parallelize`):
    dispatch a, wait, experts a, combine a, wait, dispatch b, wait, experts b, combine b, wait, shared
 -> dispatch a, dispatch b, shared, wait, experts a, combine a, wait, experts b, combine b, rest of shared, waits
and in backward the same the other way round, with gradients of weights during the exchange. What overlaps with what is
chosen for each block by `reorder` and the costs of its nodes; every rank has the same graph and so the same order.
Exchanges next to products of experts in fp8 send from few processors, which these products leave idle. Nodes stay
inside their block's forward or backward, and the whole is undone where the forecast peak would grow by more than
`OverlapExpertsOptions.memory`. Tier exact: every node keeps its operator and its inputs.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, for two streams of tokens in turn.

Orders a stretch of nodes so that computation that can wait overlaps with collectives: list scheduling.

Nodes are chosen one by one, on paper as `costs.timeline` runs them: first the ones that a collective still to
start needs, in the order of the collectives, so that each starts soon; then, while one is in flight, whatever does not
need its result; its wait comes once it is there, or when nothing else is left. Among equals the order stays. What
depends on each other, through memory that is written too, stays in order.

Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969 (list scheduling by priorities).
"""

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.memory import estimate_memory
from stepgraph.costs.timeline import Timeline, assumed_seconds, assumed_timeline
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import ROWS_BEGIN, WAIT, halves, operator_of, stage_of
from stepgraph.graph.facts import is_mutating, is_overload, is_pointwise, is_pure, is_random, is_view, packet
from stepgraph.graph.order import dependencies
from stepgraph.graph.provenance import phase_of, provenance, role_of
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_IN_FP8 = (ours.grouped_scaled_mm.default, ours.grouped_scaled_mm_weight.default)
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, ours.grouped_mm, ours.grouped_mm_weight, ours.scaled_product)


class Travel(NamedTuple):
    """A collective on its way: seconds alone, in a stream of its group's."""

    group: str
    seconds: float


def reorder(
    window: Sequence[fx.Node], aliases: Aliases, seconds: Mapping[fx.Node, float], travels: Mapping[fx.Node, Travel]
) -> list[fx.Node]:
    """The nodes of ``window``, which are consecutive, in a new order.

    ``seconds``: of nodes that compute. ``travels``: of nodes that begin collectives to overlap with computation;
    each has one wait.
    """
    return _List(window, dependencies(window, aliases, _has_effect), seconds, travels).run()


def _has_effect(node: fx.Node) -> bool:
    """Whether the node's order counts beyond tensors: random numbers, checks, operators that are not known."""
    if is_pure(node) or operator_of(node) or is_mutating(node):
        return is_random(node)
    return is_random(node) or not is_overload(node) or not node.target._schema.returns


class _List:
    """One run of the list scheduler."""

    def __init__(
        self,
        window: Sequence[fx.Node],
        before: Mapping[fx.Node, set[fx.Node]],
        seconds: Mapping[fx.Node, float],
        travels: Mapping[fx.Node, Travel],
    ):
        self.seconds, self.travels = seconds, travels
        self.index = {node: i for i, node in enumerate(window)}
        self.missing = {node: len(found) for node, found in before.items()}
        self.after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, found in before.items():
            for other in found:
                self.after[other].append(node)
        #: The place of the first collective that needs a node.
        self.needed_by: dict[fx.Node, float] = {}
        for node in reversed(window):
            later = min((self.needed_by[other] for other in self.after[node]), default=math.inf)
            self.needed_by[node] = min(later, self.index[node]) if node in travels else later
        self.ready: list[tuple[float, int, fx.Node]] = []  # a heap: what the first collective needs first
        self.waiting: list[tuple[float, int, fx.Node]] = []  # a heap: waits by when their collective finishes
        self.now, self.free_at, self.ends = 0.0, defaultdict(float), {}
        self.order: list[fx.Node] = []

    def run(self) -> list[fx.Node]:
        for node, count in self.missing.items():
            if not count:
                self._offer(node)
        while self.ready or self.waiting:
            if not self.ready:
                self.now = max(self.now, self.waiting[0][0])
            while self.waiting and self.waiting[0][0] <= self.now:
                self._push(heapq.heappop(self.waiting)[-1])
            self._emit(heapq.heappop(self.ready)[-1])
        return self.order

    def _push(self, node: fx.Node) -> None:
        heapq.heappush(self.ready, (self.needed_by[node], self.index[node], node))

    def _offer(self, node: fx.Node) -> None:
        """``node`` may run: at once, or when its collective has finished."""
        if stage_of(node) in ("wait", "end") and node.args[0] in self.ends:
            heapq.heappush(self.waiting, (self.ends[node.args[0]], self.index[node], node))
        else:
            self._push(node)

    def _emit(self, node: fx.Node) -> None:
        self.order.append(node)
        self.now += self.seconds.get(node, 0.0)
        if node in self.travels:
            group, took = self.travels[node]
            self.ends[node] = self.free_at[group] = max(self.now, self.free_at[group]) + took
        for other in self.after[node]:
            self.missing[other] -= 1
        free = [other for other in self.after[node] if not self.missing[other]]
        for other in sorted(free, key=self.index.__getitem__):
            # A node that unpacks a result stays with the node that made it.
            self._emit(other) if other.target is operator.getitem else self._offer(other)


_KINDS = ("dispatch", "combine")


@dataclass(frozen=True)
class OverlapExpertsOptions:
    """``memory``: the share by which the forecast peak may grow, from 0."""

    memory: float = 0.05

    def __post_init__(self) -> None:
        if self.memory < 0:
            raise ValueError(f"overlap_experts memory={self.memory} is negative; use 0 to allow no growth")


@register(
    "overlap_experts",
    "exact",
    options=OverlapExpertsOptions(),
    after=("recompute", "reshard_after_forward", "bucket_collectives", "bucket_all_reduces"),
    needs_process_group=True,
)
def overlap_experts(step: StepGraph, options: OverlapExpertsOptions, report: PassReport) -> None:
    """Overlap the dispatch and combine of experts' tokens with shared experts, the other half and weight gradients."""
    found = _exchanges(step)
    report.matched = len(found)
    if not found:
        return
    before, peak = assumed_timeline(step.graph), estimate_memory(step.graph).peak
    original = list(step.graph.nodes)
    aliases, seconds = Aliases(step.graph), _where_read(step.graph, assumed_seconds(step.graph) | _waiting(step))
    windows = list(_windows(step, found, original))
    for window in windows:
        travels = {n: Travel(links.group_name(n), links.seconds(n)) for n in window if n in found}
        _place(window, reorder(window, aliases, seconds, travels))
    narrow = _narrow(step, found)
    after = estimate_memory(step.graph).peak
    grown = f"peak memory about {peak / 2**20:.1f} MiB before, {after / 2**20:.1f} after"
    if after > (1 + options.memory) * peak:
        for window in windows:
            _place(window, window)
        report.notes.append(f"{grown}, above the {options.memory:.0%} that it may grow by: the order stays")
        return
    report.changed = sum(a is not b for a, b in zip(original, step.graph.nodes, strict=True))
    report.summary = f"{report.changed} nodes moved around {len(found)} exchanges, in {len(windows)} stretches"
    for node in narrow:
        node.kwargs = {**node.kwargs, "narrow": True}
    report.notes += [f"{len(narrow)} exchanges on processors that products in fp8 leave idle"] if narrow else []
    report.notes += _effects(step, found, before, assumed_timeline(step.graph))
    report.notes.append(grown)


def _exchanges(step: StepGraph) -> set[fx.Node]:
    """The collectives that begin to dispatch or to combine."""
    return {
        node
        for node in step.nodes("forward", "loss", "backward")
        if stage_of(node) == "begin" and (role := role_of(node)) and role.kind in _KINDS
        and [stage_of(user) in ("wait", "end") for user in node.users] == [True]
    }  # fmt: skip


def _waiting(step: StepGraph) -> dict[fx.Node, float]:
    """Seconds that computation waits for other collectives of activations, which stay where they are."""
    waits = (node for node in step.nodes() if node.target is WAIT)
    return {n: links.seconds(n.args[0]) for n in waits if (role := role_of(n)) and role.kind == "activation"}


def _narrow(step: StepGraph, exchanges: set[fx.Node]) -> list[fx.Node]:
    """The exchanges of rows during which the first products are products of expert rows in fp8."""
    found, waiting = [], set[fx.Node]()
    for node in step.graph.nodes:
        if node in exchanges and node.target is ROWS_BEGIN:
            waiting.add(node)
        elif stage_of(node) in ("wait", "end"):
            waiting.discard(node.args[0])
        elif node.target in _IN_FP8:
            found += waiting
            waiting.clear()
        elif packet(node) in _PRODUCTS:
            waiting.clear()
    return found


def _where_read(graph: fx.Graph, seconds: dict[fx.Node, float]) -> dict[fx.Node, float]:
    """``seconds`` with those of what Inductor computes where it is first read at that place: such a node alone would
    overlap with nothing."""
    moved = dict(seconds)
    for node in graph.nodes:
        if node.users and (is_view(node) or (is_pure(node) and (is_pointwise(node) or packet(node) is aten.clone))):
            first = min(node.users)
            moved[first] = moved.get(first, 0.0) + moved.pop(node, 0.0)
    return moved


def _windows(step: StepGraph, exchanges: set[fx.Node], nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Stretches to order, one by one: from the first to the last node of each block, in forward or backward,
    that exchanges tokens. Outside blocks: from the first exchange to the last."""
    half = halves(step.graph)
    spans: dict[tuple, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        block = step.block_of(node)
        if node in half and (block or node in exchanges or any(n in exchanges for n in node.all_input_nodes)):
            spans[half[node], block].append(i)
    busy = {(half[node], step.block_of(node)) for node in exchanges}
    end = 0
    for key in sorted(busy, key=lambda key: spans[key][0]):
        start, last = max(spans[key][0], end), spans[key][-1]
        if start < last:
            yield nodes[start : last + 1]
            end = last + 1


def _place(window: list[fx.Node], order: list[fx.Node]) -> None:
    """The nodes of ``window`` in ``order``, where they are."""
    inside, behind = set(window), window[-1]
    while behind in inside:
        behind = behind.next
    for node in order:
        behind.prepend(node)


def _effects(step: StepGraph, exchanges: set[fx.Node], before: Timeline, after: Timeline) -> Iterator[str]:
    """What each exchange overlaps with, and how long computation still waits for it."""
    waited: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 3)
    for i, timeline in enumerate((before, after)):
        for c in timeline.collectives:
            if c.role in _KINDS:
                sums = waited[c.role, c.phase]
                sums[i] += c.exposed_seconds
                sums[2] += c.seconds * i
    overlapped = _overlapped(step, exchanges)
    for (kind, phase), (was, now, whole) in waited.items():
        others = overlapped.get((kind, phase), {})
        most = sorted((path for path in others if others[path] > 0), key=others.get, reverse=True)[:3]
        yield (
            f"{kind}, {phase}: of {whole * 1e3:.2f} ms exposed {was * 1e3:.2f} before, {now * 1e3:.2f} after"
            + (f", overlapping with {', '.join(most)}" if most else "")
        )


def _overlapped(step: StepGraph, exchanges: set[fx.Node]) -> dict[tuple[str, str], dict[str, float]]:
    """For each kind and phase of exchange the modules, within their block, that compute while one is in flight."""
    seconds = assumed_seconds(step.graph)
    in_flight: dict[fx.Node, tuple[str, str]] = {}
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node in step.graph.nodes:
        if node in exchanges:
            in_flight[node] = (role_of(node).kind, phase_of(node))
        elif stage_of(node) in ("wait", "end"):
            in_flight.pop(node.args[0], None)
        elif in_flight and seconds.get(node):
            block = step.block_of(node)
            path = provenance(node).path.removeprefix(block or "").strip(".") or "the block itself"
            for key in set(in_flight.values()):
                found[key][".".join(path.split(".")[:2])] += seconds[node]
    return found

"""Orders a stretch of nodes so that computation that can wait overlaps with collectives: list scheduling.

Nodes are chosen one after the other, on paper as `costs.timeline` runs them: first the ones that a collective still to
start needs, so that it starts soon; then, while one travels, whatever does not need its result; its wait comes once it
is there, or when nothing else is left. Among equals the order stays. What depends on each other, through memory that is
written too, stays in order.

Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969 (list scheduling by priorities).
"""

import heapq
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.collectives import WAIT, group_of, operator_of, stage_of
from stepgraph.graph.facts import is_mutating, is_overload, is_pure, is_random


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
    return _List(window, dependencies(window, aliases), seconds, travels).run()


def dependencies(window: Sequence[fx.Node], aliases: Aliases) -> dict[fx.Node, set[fx.Node]]:
    """For each node the nodes of ``window`` that must run before it."""
    inside = set(window)
    before: dict[fx.Node, set[fx.Node]] = {}
    wrote: dict[fx.Node, fx.Node] = {}  # by storage: its last writer
    read: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by storage: its readers since
    effect = None  # the last node with an effect beyond tensors
    turn: dict[tuple, fx.Node] = {}  # the last to begin, and to end, an exchange of each kind and group
    for node in window:
        inputs = list(node.all_input_nodes)
        if node.target is WAIT:  # what a collective reads may be written once it is there, not before
            inputs += inputs[0].all_input_nodes
        found = {n for n in node.all_input_nodes if n in inside}
        for root in {aliases.root(n) for n in inputs}:
            found |= {wrote[root]} if root in wrote else set()
            read[root].append(node)
        for root in {aliases.root(n) for n in written_arguments(node)} if is_mutating(node) else ():
            found.update(read.pop(root, ()))
            wrote[root] = node
        if _has_effect(node):
            found |= {effect} if effect else set()
            effect = node
        if (communicates := operator_of(node)) and communicates.exchange:  # what begins first ends first
            key = node.target, group_of(node)
            found |= {turn[key]} if key in turn else set()
            turn[key] = node
        before[node] = found - {node}
    return before


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
        needed = [node for node in window if node in travels]
        self.leads: set[fx.Node] = set()
        while needed:
            node = needed.pop()
            if node not in self.leads:
                self.leads.add(node)
                needed += before[node]
        self.ready: list[tuple[bool, int, fx.Node]] = []  # a heap: nodes that lead to a collective first
        self.waiting: list[tuple[float, int, fx.Node]] = []  # a heap: waits by when their collective is there
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
        heapq.heappush(self.ready, (node not in self.leads, self.index[node], node))

    def _offer(self, node: fx.Node) -> None:
        """``node`` may run: at once, or when what it waits for is there."""
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
            # What takes a result apart stays with what made it.
            self._emit(other) if other.target is operator.getitem else self._offer(other)

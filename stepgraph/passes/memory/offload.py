"""When results go to host memory and come back, and the nodes that do it.

Before -> after, for a forward result x that backward reads:
    x = f(); ...; g(x)  ->  x = f(); t = offload_begin(x); ...; h = offload_end(t, x); ...
                            y = reload_begin(h); ...; x' = reload_end(y); g(x')
The waits are as late, and copies back as early, as the cost model says that the copies take; each direction is one
queue. A compiler's pieces end between two repeated blocks, and copies begin and end there, so that no kernel is split.
Exact: a copy has the same bits. On a CPU the same nodes copy at once.
"""

import bisect
import functools
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.hardware import ASSUMED, host_copy_seconds
from stepgraph.costs.memory import kinds_of
from stepgraph.costs.roofline import Fusion, Roofline
from stepgraph.costs.timeline import simulate
from stepgraph.graph.collectives import operator_of, tail
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import is_view, tensor_bytes
from stepgraph.graph.host_copies import OFFLOAD_BEGIN, OFFLOAD_END, RELOAD_BEGIN, RELOAD_END, is_host_copy
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.values import BatchLeaf, Value
from stepgraph.passes.memory.recompute import Plan

#: Blocks from which on a compiler's pieces are cut between them.
_FEWEST_BLOCKS = 4
_INSIDE = ("forward", "loss", "backward")
#: Blocks that a result which computation must wait for is under way.
_FARTHEST = 2


class Trip(NamedTuple):
    """Places in the graph of a result's copy to the host (``out``), of the wait for it (``away``), of its copy back
    (``back``) and of the wait for that (``there``): before the node at each. ``hidden``: computation waits for none."""

    out: int
    away: int
    back: int
    there: int
    hidden: bool


class Trips:
    """Where copies of a step's results begin and end. ``compiled``: whether a compiler joins nodes to kernels."""

    def __init__(self, plan: Plan, compiled: bool):
        self.plan, nodes = plan, plan.nodes
        graph, aliases = plan.step.graph, plan.aliases
        self.fusion = Fusion(graph, aliases, compiled)
        self.seconds = seconds = Roofline(graph, aliases, self.fusion, ASSUMED).seconds
        starts = simulate(graph, seconds, ASSUMED, links.groups_of(graph.nodes)).starts
        self.times: list[float] = []
        """When each node runs, in seconds."""
        self.done: list[float] = []
        """When all that computes before each node has run."""
        done = 0.0
        for node in nodes:
            self.times.append(max(starts.get(node.name, 0.0), self.times[-1] if self.times else 0.0))
            self.done.append(done)
            done = max(done, starts.get(node.name, 0.0) + seconds.get(node, 0.0))
        self.undelayed = np.array(self.times)
        self._seconds = functools.cache(lambda root: host_copy_seconds(tensor_bytes(root)))  # of its copy
        self.first_backward = next((i for i, node in enumerate(nodes) if plan.is_backward(node)), len(nodes) - 1)
        self.block_ends, self.block_begins = self._block_ends(("forward", "loss")), self._block_ends(("backward",))
        cut = compiled and len(plan.step.blocks) >= _FEWEST_BLOCKS
        self.ends, self.begins = (self.block_ends, self.block_begins) if cut else (range(len(nodes)),) * 2
        #: The latest place where a copy to the host begins, and the earliest where one comes back.
        self.latest = self.block_ends[-1] if cut else self.first_backward
        self.earliest = max(self.block_begins[0] if cut else 0, self.first_backward)

    def delay(self, seconds: dict[int, float]) -> None:
        """Let recomputation take ``seconds`` just before the nodes at these places."""
        late = np.zeros(len(self.times))
        late[list(seconds)] = list(seconds.values())
        self.times = (self.undelayed + np.cumsum(late) - late).tolist()

    def _block_ends(self, phases: Collection[str]) -> list[int]:
        """Where nothing more computes in one repeated block before another begins, and where the last has ended: as a
        compiler's pieces are cut, views of results belong to the computation that follows."""
        plan, finishing = self.plan, tail(self.plan.step)
        made = set(plan.step.placeholders(BatchLeaf, Value))
        entered: set[str] = set()
        found, latest, last = [], 0, 0
        for place, node in enumerate(plan.nodes):
            if made.isdisjoint(node.all_input_nodes):
                continue
            made.add(node)
            if phase_of(node) not in _INSIDE or is_view(node) or operator_of(node) or node in finishing:
                continue
            block = plan.block[node]
            if phase_of(node) in phases and block is not None:
                if block not in entered:
                    entered.add(block)
                    found.append(latest + 1)
                last = place + 1
            latest = place
        return [*found, last]

    def can_go(self) -> set[fx.Node]:
        """The saved results that may be offloaded: activations that are dense in memory and never written again, made
        before the end of the last block, and not read by backward before it comes to that."""
        kinds, aliases = kinds_of(self.plan.step, self.plan.aliases), self.plan.aliases
        return {
            root
            for root in self.plan.saved
            if kinds.get(root) == "activations"
            and not (aliases.writes.get(root) or operator_of(root) or is_host_copy(root))
            and tensor_bytes(root)
            and _is_dense(root)
            and aliases.position[root] < self.latest
            and all(p < self.latest or p >= self.earliest for p in aliases.reads(root))
        }

    def schedule(self, needs: Iterable[tuple[fx.Node, int, int]]) -> dict[fx.Node, Trip]:
        """The trips of results. ``needs``: (result, place of its last reader in forward, place where backward reads it
        first)."""
        needs = sorted(needs, key=lambda need: self.plan.aliases.position[need[0]])
        away, free = {}, 0.0
        for root, _, _ in needs:
            out = self._at_or_after(self.ends, self.plan.aliases.position[root] + 1, self.latest)
            free = max(free, self.times[out]) + self._seconds(root)
            place = bisect.bisect_left(self.times, free, out, self.earliest)
            away[root] = out, self._at_or_after(self.ends, place, self.earliest), free
        trips, until = {}, float("inf")
        for root, _, first in sorted(needs, key=lambda need: -need[2]):
            there = self._at_or_before(self.begins, first, self.earliest)
            until = min(until, self.times[there]) - self._seconds(root)
            back = max(bisect.bisect_right(self.times, until) - 1, self.earliest)
            back = min(self._at_or_before(self.begins, back, self.earliest), there)
            out, end, done = away[root]
            # Where computation waits, or memory would not be free.
            if waits_out := done > self.times[end]:
                i = bisect.bisect_left(self.block_ends, out) + _FARTHEST
                end = min(end, self.block_ends[min(i, len(self.block_ends) - 1)]) if self.block_ends[-1] >= out else end
            if waits_back := until < self.times[back]:
                i = bisect.bisect_right(self.block_begins, there) - 1 - _FARTHEST
                back = max(back, min(self.block_begins[max(i, 0)], there))
            hidden = not (waits_out or waits_back)
            trips[root] = Trip(out, max(out, end), max(back, end), there, hidden)
        return trips

    @staticmethod
    def _at_or_after(places: list[int] | range, place: int, most: int) -> int:
        at = bisect.bisect_left(places, place)
        return min(places[at], most) if at < len(places) else most

    @staticmethod
    def _at_or_before(places: list[int] | range, place: int, least: int) -> int:
        at = bisect.bisect_right(places, place)
        return max(places[at - 1], least) if at else least


def _is_dense(node: fx.Node) -> bool:
    value = node.meta["val"]
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return span == value.numel()


def rewrite(plan: Plan, trips: dict[fx.Node, Trip], again: set[fx.Node]) -> None:
    """Let each result of ``trips`` go to the host and come back, and recompute those of ``again``."""
    there: dict[fx.Node, fx.Node] = {}
    stages: dict[fx.Node, fx.Node] = {}

    def add(target: object, at: int, root: fx.Node, phase: str, *args: object) -> None:
        build = Builder(root, before=plan.nodes[at])
        build.origin = provenance(root)._replace(phase=phase, role=None)
        stages[root] = build(target, *args)

    def ordered(which: int) -> list[fx.Node]:
        return sorted(trips, key=lambda root: (trips[root][which], plan.aliases.position[root]))

    for root in ordered(0):
        add(OFFLOAD_BEGIN, trips[root].out, root, phase_of(root), root)
    for root in ordered(1):
        add(OFFLOAD_END, trips[root].away, root, phase_of(root), stages[root], root)
    for root in sorted(trips, key=lambda root: (trips[root].back, trips[root].there)):
        add(RELOAD_BEGIN, trips[root].back, root, "backward", stages[root], root.meta["val"].device)
    for root in ordered(3):
        add(RELOAD_END, trips[root].there, root, "backward", stages[root])
        there[root] = stages[root]
    plan.rewrite(again.union(trips), there)

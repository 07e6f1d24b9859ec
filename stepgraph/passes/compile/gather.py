"""Reorders a graph so that the nodes of every region stand together and each region can become one call.

A node waits for what it reads, for an earlier write to what it reads, and for an earlier read of what it writes; nodes
with other effects (random numbers, collectives, operators that are not torch's) keep their order among themselves.
Where a node of a region waits for another one of it through a node outside, the region cannot be one call: it is cut
into parts, which are called one after the other. So are two regions that wait for each other, since a gathered region
counts as one node.
"""

import operator
from collections.abc import Sequence

from torch import fx

from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.facts import is_mutating, is_pointwise, is_pure, is_random, is_view
from stepgraph.graph.order import dependencies
from stepgraph.inductor.regional import KEY, Piece, Region, region_of


def gather(graph: fx.Graph) -> tuple[list[Piece], list[str]]:
    """Reorder ``graph`` and return (the pieces that are worth compiling, notes for the report).

    Tags of other nodes are removed.
    """
    order = _Order(graph)
    regions, notes = _regions(graph, order.aliases)
    pieces: list[Piece] = []
    for region, nodes in regions.items():
        parts: list[list[fx.Node]] = []
        while nodes:
            part, nodes = order.gather(nodes)
            parts.append(part)
        if len(parts) > 1:
            notes.append(f"{region.kind} {region.id} waits for itself through nodes outside: cut into {len(parts)}")
        pieces += [Piece(region, part) for part in parts]
    order.apply()
    kept = [piece for piece in pieces if piece.outputs and _fuses(piece)]
    tagged = {node for piece in kept for node in piece.nodes}
    for node in graph.nodes:
        if node not in tagged:
            node.meta.pop(KEY, None)
    return kept, notes


def _regions(graph: fx.Graph, aliases: Aliases) -> tuple[dict[Region, list[fx.Node]], list[str]]:
    """The nodes of every region, in order. A getitem belongs to the operator that it takes apart."""
    regions: dict[Region, list[fx.Node]] = {}
    notes: list[str] = []
    region_by_node: dict[fx.Node, Region] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        takes_apart = node.target is operator.getitem
        region = region_by_node.get(node.args[0]) if takes_apart else region_of(node)
        if region is not None:
            region_by_node[node] = region
            regions.setdefault(region, []).append(node)
    for region, nodes in list(regions.items()):
        own = {aliases.root(node) for node in nodes} & set(nodes)
        outside = [n for n in nodes if is_mutating(n) and any(aliases.root(w) not in own for w in written_arguments(n))]
        if outside:
            notes.append(f"{region.kind} {region.id} left to eager: {outside[0].name} writes into what lies outside")
            del regions[region]
    return regions, notes


def _fuses(piece: Piece) -> bool:
    """Whether compiling can gain: a lone cheap operator is one kernel in eager as well."""
    working = [n for n in piece.nodes if n.target is not operator.getitem and not is_view(n)]
    return len(working) > 1 or not all(map(is_pointwise, working))


class _Order:
    """An order of a graph's nodes that keeps all dependencies, and the blocks gathered in it so far."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.aliases = graph, Aliases(graph)
        self.nodes = list(graph.nodes)
        self.position = dict(self.aliases.position)
        self.block: dict[fx.Node, list[fx.Node]] = {}
        self.needed = dependencies(self.nodes, self.aliases, _has_effect)

    def gather(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Bring together the ``nodes`` that wait for none of the others through a node outside: (they, the rest).

        Only nodes between the first and the last of them move: what waits for a gathered one goes after them.
        """
        wanted = set(nodes)
        first, last = (choose(self.position[n] for n in nodes) for choose in (min, max))
        before: list[fx.Node] = []
        gathered, behind, rest = [], [], []
        here, late = set(), set()  # the nodes of the first two
        i = first
        while i <= last:
            unit = self.block.get(self.nodes[i], [self.nodes[i]])
            i += len(unit)
            waits = set().union(*(self.needed[node] for node in unit))
            if unit[0] in wanted and late.isdisjoint(waits):
                gathered += unit
                here.update(unit)
            elif unit[0] in wanted or not (here.isdisjoint(waits) and late.isdisjoint(waits)):
                behind += unit
                late.update(unit)
                rest += unit if unit[0] in wanted else []
            else:
                before += unit
        self.nodes[first : last + 1] = [*before, *gathered, *behind]
        for i in range(first, last + 1):
            self.position[self.nodes[i]] = i
        for node in gathered:
            self.block[node] = gathered
        return gathered, rest

    def apply(self) -> None:
        """Put the graph's nodes into this order."""
        for previous, node in zip(self.nodes, self.nodes[1:], strict=False):
            if previous.next is not node:
                previous.append(node)


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_random(node) or not (is_pure(node) or is_mutating(node)))

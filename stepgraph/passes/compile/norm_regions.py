"""Finds the nodes of every norm, with its pointwise neighbours, as a region for the compiler.

A norm is recognized by an ``rsqrt`` or by torch's fused operators, its backward by reading the forward's ``rsqrt``. Its
other nodes are the ones of the same module and phase that are connected to it.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from stepgraph.graph.facts import aten, is_cast, is_pointwise, is_random, is_view
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.inductor.regional import region_of

_FUSED = {
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
}
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.var.correction, aten.var_mean.correction}


def norms(step: StepGraph) -> Iterator[list[fx.Node]]:
    """The nodes of each norm, forward or backward, in the graph's order."""
    modules: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    for node in step.nodes("forward", "backward"):
        if _is_fusible(node) and region_of(node) is None:
            found = provenance(node)
            modules[found.path, found.phase].append(node)
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    for nodes in modules.values():
        if any(map(_marks_a_norm, nodes)):
            for part in _connected(nodes):
                if any(map(_marks_a_norm, part)):
                    yield sorted(_trimmed(_with_neighbours(part)), key=position.__getitem__)


def _is_fusible(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_fusible(node.args[0])
    if is_random(node):
        return False
    return node.target in _FUSED or node.target in _REDUCTIONS or is_view(node) or is_pointwise(node)


def _marks_a_norm(node: fx.Node) -> bool:
    if node.target in _FUSED or node.target is aten.rsqrt.default:
        return True
    return phase_of(node) == "backward" and any(i.target is aten.rsqrt.default for i in node.all_input_nodes)


def _connected(nodes: list[fx.Node]) -> list[set[fx.Node]]:
    """The connected sets of ``nodes``: one reads the other, or both read one computed tensor."""
    leader: dict[fx.Node, fx.Node] = {node: node for node in nodes}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "call_function":
                leader.setdefault(source, source)
                leader[find(source)] = find(node)
    parts: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in nodes:
        parts[find(node)].add(node)
    return list(parts.values())


def _with_neighbours(nodes: set[fx.Node]) -> set[fx.Node]:
    """``nodes`` and what the compiler takes along for nothing: before them residual additions, sums of gradients and
    casts, after them casts."""
    phase = phase_of(next(iter(nodes)))
    grown, queue = set(nodes), list(nodes)
    while queue:
        node = queue.pop()
        before = [n for n in node.all_input_nodes if n.target is aten.add.Tensor or is_cast(n)]
        before = [n for n in before if n.args[0].op == "call_function"]
        behind = [n for n in node.users if is_cast(n)] if node in nodes else []
        for neighbour in (*before, *behind):
            if neighbour not in grown and phase_of(neighbour) == phase and region_of(neighbour) is None:
                grown.add(neighbour)
                queue.append(neighbour)
    return grown


def _trimmed(nodes: set[fx.Node]) -> set[fx.Node]:
    """``nodes`` without the views at the edges, which cost nothing outside."""
    edges = [True]
    while edges:
        edges = [n for n in nodes if is_view(n) and (nodes.isdisjoint(n.users) or nodes.isdisjoint(n.all_input_nodes))]
        nodes = nodes.difference(edges)
    return nodes

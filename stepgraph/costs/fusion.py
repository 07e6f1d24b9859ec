"""Groups nodes that a compiler would make one kernel: values passed within one cost no memory and no traffic."""

import operator

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import WAIT
from stepgraph.graph.facts import is_mutating, is_pointwise, of_target, packet, returns_view
from stepgraph.graph.host_copies import COPIES
from stepgraph.graph.provenance import phase_of

aten = torch.ops.aten

#: Operators, apart from pointwise ones, that a generated kernel computes with what surrounds them.
_FUSIBLE = {
    aten.sum, aten.mean, aten.amax, aten.where, aten.masked_fill, aten.expand, aten.cat, aten.arange,
    aten.scalar_tensor, aten.ones_like, aten.zeros_like, aten.full_like, aten.full, aten.pow,
    aten.linalg_vector_norm, aten.gather, aten.stack, aten.silu_backward, aten._log_softmax,
    aten._log_softmax_backward_data, aten.slice_backward, aten.select_backward, aten.constant_pad_nd,
}  # fmt: skip

#: Updates into whose kernels a compiler takes the clipping of their gradients.
_UPDATES = (aten._fused_adam_, aten._fused_adamw_)


def is_free(node: fx.Node) -> bool:
    """Whether the node runs nothing."""
    return node.op != "call_function" or node.target is operator.getitem or _runs_nothing(node.target)


@of_target
def _runs_nothing(target: object) -> bool:
    return returns_view(target) or target is WAIT or target in COPIES


class Fusion:
    """Groups of nodes that share a kernel.

    Two fusible nodes are one kernel if one reads the other and no other kind of node lies on a path between them: a
    node's level counts the nodes that cannot be fused on the longest path to it, and equal levels exclude one between.
    Forward and backward are never joined; the loss goes with backward. With ``fused`` False each node is a kernel of
    its own. What backward makes early for what it runs later alone, such as cheap nodes that it computes again, has the
    level of its first reader. A sum along columns is a kernel of its own where what it reads is in memory anyway.
    """

    def __init__(self, graph: fx.Graph, aliases: Aliases, fused: bool):
        self._parent: dict[fx.Node, fx.Node] = {}
        if fused:
            self._join(graph, aliases)

    def _join(self, graph: fx.Graph, aliases: Aliases) -> None:
        level, fusible, stored = _levels(graph, aliases)
        for node in graph.nodes:
            sources = [aliases.root(source) for source in node.all_input_nodes]
            if node in fusible:
                for source in sources:
                    alike = source in fusible and level[source] == level[node] and _side(source) == _side(node)
                    if alike and not (source in stored and _sums_columns(node)):
                        self._unite(source, node)
            elif packet(node) in _UPDATES:
                clipped = {aliases.root(grad) for grad in node.args[1]}
                for clip in graph.find_nodes(op="call_function", target=aten.mul_.Tensor):
                    if phase_of(clip) == "optimizer" and aliases.root(clip) in clipped:
                        self._unite(clip, node)

    def _unite(self, source: fx.Node, node: fx.Node) -> None:
        other, own = self.kernel(source), self.kernel(node)
        if other is not own:
            self._parent[other] = own

    def kernel(self, node: fx.Node) -> fx.Node:
        """The node that represents ``node``'s kernel."""
        top = node
        while top in self._parent:
            top = self._parent[top]
        while node is not top:
            self._parent[node], node = top, self._parent[node]
        return top


def _levels(graph: fx.Graph, aliases: Aliases) -> tuple[dict[fx.Node, int], set[fx.Node], set[fx.Node]]:
    """(level of each node, fusible nodes, fusible nodes whose results kernels that are not fused read from memory)."""
    level: dict[fx.Node, int] = {}
    fusible: set[fx.Node] = set()
    stored: set[fx.Node] = set()
    for node in graph.nodes:
        sources = [aliases.root(source) for source in node.all_input_nodes]
        level[node] = max((level[s] + (s.op == "call_function" and s not in fusible) for s in sources), default=0)
        if not is_free(node) and (not is_mutating(node) and (is_pointwise(node) or packet(node) in _FUSIBLE)):
            fusible.add(node)
        elif not is_free(node) or node.op == "output":
            stored.update(sources)
    first: dict[fx.Node, int] = {}  # the lowest level that reads each result
    for node in reversed(graph.nodes):
        if node in fusible and phase_of(node) == "backward":
            level[node] = max(level[node], first.get(node, 0))
        if not is_free(node):
            for source in map(aliases.root, node.all_input_nodes):
                reads = level[node] if phase_of(node) == "backward" else 0
                first[source] = min(first.get(source, reads), reads)
    return level, fusible, stored & fusible


def _sums_columns(node: fx.Node) -> bool:
    """Whether the node adds rows up, as a bias has it for its gradient."""
    if packet(node) is not aten.sum or len(node.args) < 2 or not node.args[1]:
        return False
    rank = node.args[0].meta["val"].ndim
    return rank > 1 and all(dim % rank < rank - 1 for dim in node.args[1])


def _side(node: fx.Node) -> str:
    phase = phase_of(node)
    return "backward" if phase == "loss" else phase

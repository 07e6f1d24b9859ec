"""Which nodes must keep their order when nodes of a graph move."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import fx

from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.collectives import WAIT, group_of, operator_of
from stepgraph.graph.facts import is_mutating


def dependencies(
    window: Sequence[fx.Node], aliases: Aliases, has_effect: Callable[[fx.Node], bool]
) -> dict[fx.Node, set[fx.Node]]:
    """For each node the nodes of ``window`` that must run before it: what it reads, earlier writes to what it reads,
    and earlier reads of what it writes. Nodes for which ``has_effect`` is true keep their order among themselves."""
    inside = set(window)
    before: dict[fx.Node, set[fx.Node]] = {}
    wrote: dict[fx.Node, fx.Node] = {}  # by storage: its last writer
    read: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # by storage: its readers since
    effect = None  # the last node with an effect beyond tensors
    turn: dict[tuple, fx.Node] = {}  # the last node to begin, or end, an exchange of each kind and group
    for node in window:
        inputs = list(node.all_input_nodes)
        if node.target is WAIT:  # what a collective reads may be written only after the wait
            inputs += inputs[0].all_input_nodes
        found = {n for n in node.all_input_nodes if n in inside}
        for root in {aliases.root(n) for n in inputs}:
            found |= {wrote[root]} if root in wrote else set()
            read[root].append(node)
        for root in {aliases.root(n) for n in written_arguments(node)} if is_mutating(node) else ():
            found.update(read.pop(root, ()))
            wrote[root] = node
        if has_effect(node):
            found |= {effect} if effect else set()
            effect = node
        if (communicates := operator_of(node)) and communicates.exchange:  # what begins first ends first
            key = node.target, group_of(node)
            found |= {turn[key]} if key in turn else set()
            turn[key] = node
        before[node] = found - {node}
    return before


def readers(nodes: Sequence[fx.Node], end: fx.Node) -> list[fx.Node]:
    """What is made from ``nodes`` before ``end``, in order."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        users = [user for user in queue.pop().users if user < end and user not in found]
        found.update(users)
        queue += users
    return sorted(found)

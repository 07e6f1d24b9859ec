"""Finds values that are made from one parameter alone, in the nodes of forward and of autograd."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from stepgraph.graph.aliases import written_arguments
from stepgraph.graph.collectives import operator_of
from stepgraph.graph.facts import is_mutating, is_pure

#: In the place of a parameter: several of them, or one and something else.
MIXED = object()


def made_from(graph: fx.Graph, parameters: set[fx.Node]) -> dict[fx.Node, Any]:
    """For each node the parameter (its placeholder) that it is made from by gathers and pure operators alone, before
    anything writes the parameter; `MIXED` where from several or with more than constants; None where from none."""
    made: dict[fx.Node, Any] = {}
    constant: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        operator = operator_of(node)
        copies = operator.kind in ("all_gather", "") if operator else is_pure(node)
        sources = {made[n] for n in inputs} - {None}
        made[node] = node if node in parameters else None
        if copies and constant.issuperset(inputs):
            constant.add(node)
        elif sources:
            (source, *others) = sources
            alone = copies and not others and all(made[n] or n in constant for n in inputs)
            made[node] = source if alone and source not in written else MIXED
        if is_mutating(node):
            written |= {made[n] for n in written_arguments(node)}
    return made


class Owners:
    """The parameter whose gradient alone an autograd node works on.

    ``leaves``: the placeholder of each parameter, by the tensor's id. ``forward``: the nodes that forward created for
    an autograd node, by its sequence number. ``made``: see `made_from`.
    """

    def __init__(self, leaves: Mapping[int, fx.Node], forward: Mapping[int, Sequence[fx.Node]], made: Mapping):
        self._leaves, self._forward, self._made = leaves, forward, made
        self._found: dict[Any, Any] = {}

    def of(self, start: Any) -> fx.Node | None:
        """The parameter that all paths from the autograd node ``start`` lead to, where forward made what they pass
        from that parameter alone."""
        found, stack = self._found, [start]
        while stack:
            node = stack[-1]
            following = [n for n, _ in node.next_functions if n is not None]
            waiting = [n for n in following if n not in found]
            if waiting and node not in found:
                stack += waiting
            else:
                found[node] = found[node] if node in found else self._owner(node, following)
                stack.pop()
        return None if found[start] is MIXED else found[start]

    def _owner(self, node: Any, following: Sequence[Any]) -> Any:
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._leaves.get(id(node.variable), MIXED)
        # The first that a parameter takes part in: operators that need no gradient may have run since.
        first = next((made for n in self._forward.get(node._sequence_nr(), ()) if (made := self._made[n])), None)
        owners = {first, *map(self._found.__getitem__, following)} - {None}
        return owners.pop() if len(owners) == 1 else MIXED if owners else None

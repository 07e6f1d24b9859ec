"""A stage's graph as the graphs that a schedule calls: forward, and backward whole or as its two halves.

``backward_input`` computes the gradients that the stage before waits for; ``backward_weight``, which nobody waits for,
the gradients of parameters. What one graph makes and another reads is a named value of the program, kept for as long.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for the two halves.
"""

from collections.abc import Iterable

from torch import fx

from stepgraph.graph.calls import Kind
from stepgraph.graph.facts import upstream
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.stages.assign import follows, free_nodes
from stepgraph.graph.stages.extract import extract
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Output, Value


def pieces_of(step: StepGraph, stage: int, halves: bool) -> dict[Kind, StepGraph]:
    """The graphs of a stage's ``step`` by their kind: ``forward``, and ``backward``, or with ``halves``
    ``backward_input`` and ``backward_weight``. ``stage``: its number, by which what is kept between them is named."""
    free = free_nodes(step)
    place = _places(step, halves)
    kinds = (Kind.FORWARD, *((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if halves else (Kind.BACKWARD,)))
    returned: dict[Kind, list[tuple[Output, fx.Node]]] = {kind: [] for kind in kinds}
    for node, what in step.returned():
        returned[place.get(node, Kind.FORWARD)].append((what, node))
    for node, kind in place.items():
        users = {place[user] for user in node.users if user in place}
        users |= {place[user] for user in _through(node, free) if user in place}
        if node not in free and users - {kind}:
            returned[kind].append((Value(node.name, stage), node))
    return {
        kind: extract(
            step,
            [n for n, where in place.items() if where == kind and n not in free],
            returned[kind],
            lambda node: Value(node.name, stage),
            free,
        )
        for kind in kinds
    }


def _through(node: fx.Node, free: set[fx.Node]) -> Iterable[fx.Node]:
    """What reads ``node`` by way of nodes in ``free``."""
    queue = [user for user in node.users if user in free]
    while queue:
        for user in queue.pop().users:
            if user in free:
                queue.append(user)
            else:
                yield user


def _places(step: StepGraph, halves: bool) -> dict[fx.Node, Kind]:
    """The kind of graph that each node goes to."""
    late: set[fx.Node] = set()
    for node in step.nodes():
        if phase_of(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    place = {node: Kind.BACKWARD if node in late else Kind.FORWARD for node in step.nodes()}
    needed = set(_awaited(step, late))
    for node in list(needed):
        needed |= upstream(node)
    for node, kind in place.items():
        if halves and kind is Kind.BACKWARD:
            place[node] = Kind.BACKWARD_INPUT if node in needed else Kind.BACKWARD_WEIGHT
        if follows(node):
            place[node] = place[node.args[0]]
    return place


def _awaited(step: StepGraph, late: set[fx.Node]) -> list[fx.Node]:
    """The gradients that are sent on; for the first stage, which sends none, the ones that leave its blocks."""
    sent = [node for node, what in step.returned() if isinstance(what, Value) and node in late]
    if sent:
        return sent
    inside = [n for n in late if step.block_of(n) is not None]
    return [n for n in inside if any(u in late and step.block_of(u) is None for u in n.users)]

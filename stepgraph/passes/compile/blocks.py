"""Where each repeated block of a model runs in the graph's order, and the pieces for compiling by block."""

import operator
from collections.abc import Callable

from torch import fx

from stepgraph.graph import collectives
from stepgraph.graph.facts import is_view
from stepgraph.graph.host_copies import is_host_copy
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import BatchLeaf
from stepgraph.inductor.regional import Piece, Region

#: Blocks below which no two are alike: what overlaps with the first and the last differs from the others.
FEWEST = 4

#: 0 in forward, 1 in backward, and the block that runs there; between the blocks of forward and backward, where no
#: block runs, 1; after backward's blocks, 2.
Part = tuple[int, str | None]


def consecutive(step: StepGraph, kind_of: Callable[[fx.Node], str | None], *, cut: bool) -> list[Piece]:
    """The longest runs of consecutive operators of one kind, except None; ``cut``: also of one part, where
    the model has enough blocks that some have equal neighbours.

    A getitem moves to the operator that it takes apart, and belongs to it; constants move to the graph's inputs.
    """
    last = step.placeholders()[-1]
    for node in reversed(step.graph.find_nodes(op="get_attr")):
        last.append(node)
    for node in reversed(step.calling(operator.getitem)):
        node.args[0].append(node)
    part_of = parts(step) if cut and len(step.blocks) >= FEWEST else {}
    runs: list[tuple[Region, list[fx.Node]]] = []
    previous = None
    for node in step.nodes():
        if node.target is not operator.getitem:
            kind = kind_of(node)
            key = kind and (kind, part_of.get(node))
            if key and key != previous:
                runs.append((Region(node.name, kind), []))
            previous = key
        if previous:
            runs[-1][1].append(node)
    return [Piece(region, nodes) for region, nodes in runs]


def parts(step: StepGraph) -> dict[fx.Node, Part]:
    """The part that each node of forward, loss, backward and of the optimizer lies in: equal blocks, equal parts.

    A part lasts from the last node that computes in one block to the last that computes in the next. What was moved out
    of its block to overlap with another's, such as gathers of parameters and reductions of gradients, belongs to the
    part in which it runs. What the model computes between two blocks belongs to the block before it. The update of a
    parameter belongs to the parameter's block.
    """
    numbers = {node: 0 if half == "forward" else 1 for node, half in collectives.halves(step.graph).items()}
    computing = _computing(step)
    last = {numbers[node]: node for node, block in computing.items() if block is not None}
    result: dict[fx.Node, Part] = {}
    stretch, current = -1, (-1, None)
    entered: set[str] = set()
    waiting: list[fx.Node] = []
    for node, number in numbers.items():
        if number != stretch:
            result |= dict.fromkeys(waiting, current)
            waiting, entered, stretch, current = [], set(), number, (number, None)
        waiting.append(node)
        if node in computing:
            block = computing[node]
            if block is not None and block not in entered:
                entered.add(block)
                current = (number, block)
            elif block is None and entered and node > last[number]:
                current = (number + 1, None)
            result |= dict.fromkeys(waiting, current)
            waiting = []
    result |= dict.fromkeys(waiting, current)
    return result | {node: (-1, step.block_of(node)) for node in step.nodes("optimizer")}


def _computing(step: StepGraph) -> dict[fx.Node, str | None]:
    """Nodes whose results depend on the batch, with their block; except for views, collectives, and what only finishes
    gradients: those may overlap with other blocks."""
    tail = collectives.tail(step)
    made = set(step.placeholders(BatchLeaf))
    found: dict[fx.Node, str | None] = {}
    for node in step.graph.nodes:
        if made.isdisjoint(node.all_input_nodes):
            continue
        made.add(node)
        inside = phase_of(node) in ("forward", "loss", "backward")
        movable = node in tail or is_host_copy(node) or collectives.stage_of(node) in ("begin", "wait", "end")
        if inside and not movable and not is_view(node):
            found[node] = step.block_of(node)
    return found

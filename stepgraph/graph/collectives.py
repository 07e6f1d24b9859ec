"""Facts about a graph's collectives: which gather parameters, which reduce gradients, the region and stretch of each.

A *stretch* is a run of forward (and loss) or of backward: a step has two for each microbatch. A *region* is a block
that the model declares, or what lies outside blocks between two of them (the embedding; the last norm and the head).
Both come from provenance and order. Collectives of tensor parallelism, which read or make activations, are neither
gathers of parameters nor reductions of gradients, and stay where they are.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import fx

import stepgraph.kernels.comm.async_matmul
import stepgraph.kernels.comm.copy_collectives  # noqa: F401  (both register their operators)
from stepgraph import compat
from stepgraph.graph import edit
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import argument, is_overload, is_pure, is_view, tensor_bytes, upstream
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)

ALL_GATHER_MATMUL = torch.ops.stepgraph.all_gather_matmul.default
MATMUL_REDUCE_SCATTER = torch.ops.stepgraph.matmul_reduce_scatter.default
PIPELINED = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)

GATHER_BEGIN = torch.ops.stepgraph.gather_begin.default
GATHER_END = torch.ops.stepgraph.gather_end.default
REDUCE_BEGIN = torch.ops.stepgraph.reduce_begin.default
REDUCE_END = torch.ops.stepgraph.reduce_end.default
COPIED = (GATHER_BEGIN, GATHER_END, REDUCE_BEGIN, REDUCE_END)


# The former names of `graph.edit`, for passes/comm.


def Builder(step: StepGraph, members: Sequence[fx.Node]) -> edit.Builder:
    return edit.Builder(*members)


def erase_chain(graph: fx.Graph, node: fx.Node) -> None:
    edit.erase_unread(node, collectives=True)


class Collective(NamedTuple):
    """A collective ``node`` and its ``wait``. ``stretch``, ``region``: numbers, in the order in which they run."""

    node: fx.Node
    wait: fx.Node
    stretch: int
    region: int

    @property
    def form(self) -> tuple:
        """What must agree for collectives to become one: operator, dtype, and every argument but the tensor."""
        return (self.node.target, self.node.meta["val"].dtype, *self.node.args[1:])


def stretches(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stretch of every node of forward, loss and backward; even ones are forward."""
    found: dict[fx.Node, int] = {}
    current = 0
    for node in graph.nodes:
        phase = phase_of(node)
        if phase in ("forward", "loss", "backward"):
            current += (phase == "backward") != current % 2
            found[node] = current
    return found


def parameter_gathers(step: StepGraph) -> list[Collective]:
    """All-gathers of parameters: what they read is made from parameters alone, and no parameter is written before."""
    aliases = Aliases(step.graph)
    parameters = set(step.placeholders("parameter"))
    made: set[fx.Node] = set(parameters)
    found = []
    for node in step.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is ALL_GATHER and inputs[0] in made:
            if not any(aliases.written_between(p, 0, aliases.position[node]) for p in _sources(inputs[0], parameters)):
                found.append(node)
        elif inputs and is_pure(node) and made.issuperset(inputs) and not aliases.writes.get(node):
            made.add(node)
    return _collectives(step, found)


def _sources(node: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    return {n for n in upstream(node) | {node} if n in among}


def gradient_tail(step: StepGraph) -> set[fx.Node]:
    """Nodes of backward that finish gradients: reductions, and what makes of their results what the optimizer reads.

    Nothing else of forward or backward reads a node of the tail, so that each may run later.
    """
    aliases = Aliases(step.graph)
    tail: set[fx.Node] = set()
    for node in reversed(step.graph.nodes):
        reduces = node.target in (REDUCE_SCATTER, ALL_REDUCE, WAIT, REDUCE_BEGIN, REDUCE_END)
        if phase_of(node) == "backward" and (reduces or _is_elementwise(node)) and _ends(node, tail):
            tail.add(node)
    # What comes before the first reduction, or reads something that is written, is backward's own.
    size = None
    while size != len(tail):
        size = len(tail)
        for node in step.graph.nodes:
            if node in tail and not (_follows(node, tail, aliases) and _ends(node, tail)):
                tail.discard(node)
    return tail


def _ends(node: fx.Node, tail: set[fx.Node]) -> bool:
    """Whether only the tail and the optimizer read ``node``."""
    return all(user in tail or phase_of(user) in ("optimizer", "output") for user in node.users)


def _follows(node: fx.Node, tail: set[fx.Node], aliases: Aliases) -> bool:
    """Whether ``node`` is a reduction, or made from nodes of the tail and inputs that nothing writes."""
    if node.target in (REDUCE_SCATTER, ALL_REDUCE, REDUCE_BEGIN):
        return True
    others = [n for n in node.all_input_nodes if n not in tail]
    given = all(n.op in ("placeholder", "get_attr") and not aliases.writes.get(aliases.root(n)) for n in others)
    return given and len(others) < len(node.all_input_nodes)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result comes from one place of each input."""
    pointwise = is_overload(node) and torch.Tag.pointwise in node.target.tags
    return pointwise or is_view(node) or node.target in (aten._to_copy.default, aten.cat.default)


def gradient_reductions(step: StepGraph, tail: set[fx.Node]) -> list[Collective]:
    """Reduce-scatters and all-reduces of gradients, from `gradient_tail`."""
    return _collectives(step, [n for n in step.graph.nodes if n in tail and n.target in (REDUCE_SCATTER, ALL_REDUCE)])


def _collectives(step: StepGraph, nodes: Iterable[fx.Node]) -> list[Collective]:
    stretch = stretches(step.graph)
    found: list[Collective] = []
    region, last = 0, None
    numbers: dict[tuple, int] = {}
    for node in nodes:
        waits = [user for user in node.users if user.target is WAIT]
        if len(waits) != 1 or len(node.users) != 1 or node not in stretch:
            continue
        block = step.block_of(node)
        # A block comes once in a stretch, whatever lies between its parts; what is outside counts by runs.
        if block is None:
            region += last != (stretch[node], None)
            number = region
        else:
            if (stretch[node], block) not in numbers:
                region += 1
                numbers[stretch[node], block] = region
            number = numbers[stretch[node], block]
        last = (stretch[node], block)
        found.append(Collective(node, waits[0], stretch[node], number))
    return found


def by_region(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """The collectives of each region in each stretch, in order."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.stretch, c.region].append(c)
    return list(groups.values())


def bytes_sent(node: fx.Node) -> float:
    """Bytes that a rank receives in the collective, counted as a ring's."""
    if node.target is GATHER_BEGIN:
        _, sizes, dtype, ranks, _ = node.args
        return sum(sizes) * dtype.itemsize * (ranks - 1)
    if node.target is REDUCE_BEGIN:
        grads, ranks, _ = node.args
        return sum(map(tensor_bytes, grads)) * (ranks - 1) / ranks
    size = tensor_bytes(node)
    if node.target is ALL_REDUCE:
        ranks = group_size(node)
        return 2 * size * (ranks - 1) / ranks
    ranks = argument(node, "group_size")
    return size * (ranks - 1) / (ranks if node.target is ALL_GATHER else 1)


def exchanging(graph: fx.Graph) -> frozenset[str]:
    """Names of the groups in which the graph's nodes communicate without NCCL (see `stepgraph.kernels.exchange`)."""
    return frozenset(node.args[-1] for node in graph.nodes if node.target in (*PIPELINED, *COPIED))


def group_size(node: fx.Node) -> int:
    """Ranks of the collective's process group."""
    if node.target is not ALL_REDUCE:
        return argument(node, "group_size")
    return compat.process_group(node.args[2]).size()


def spans_machines(group: str, ranks_per_machine: int = 0) -> str | None:
    """Why ranks of a group cannot reach each other's memory, or None. ``ranks_per_machine``: neighbours that share a
    machine; 0: as torchrun started them."""
    ranks = dist.get_process_group_ranks(compat.process_group(group))
    there = ranks_per_machine or int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return None if len({rank // there for rank in ranks}) == 1 else "its ranks do not share a machine"

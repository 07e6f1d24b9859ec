"""Facts about a graph's collectives: which gather parameters, which reduce gradients, the region and stretch of each.

A *stretch* is a run of forward (and loss) or of backward: a step has two for each microbatch. A *region* is a block
that the model declares, or what lies outside blocks between two of them (the embedding; the last norm and the head).
Both come from provenance and order. Collectives of tensor parallelism, which read or make activations, are neither
gathers of parameters nor reductions of gradients, and stay where they are.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import fx

import stepgraph.kernels.comm.async_matmul
import stepgraph.kernels.comm.copy_collectives  # noqa: F401  (both register their operators)
from stepgraph import compat
from stepgraph.graph.facts import Aliases, argument, flops, is_overload, is_pure, is_view, tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance, set_provenance
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

# What the estimate of exposed communication assumes, for kernels and links of one H200 host: FLOP/s, bytes/s in
# memory, bytes/s between ranks and seconds that any collective takes. Only shares matter.
_FLOPS_PER_S, _BYTES_PER_S, _LINK_BYTES_PER_S, LATENCY_S = 700e12, 3.5e12, 350e9, 20e-6
# Seconds of a flag's way over NVLink, and that every kernel takes however little it does: one that waits for a flag
# took 3.4 us on H200s.
_BARRIER_S, _KERNEL_S = 5e-6, 4e-6


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


def upstream(node: fx.Node) -> set[fx.Node]:
    """Everything that ``node`` is made from."""
    seen: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue += current.all_input_nodes
    return seen


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


def attribute(step: StepGraph, nodes: Sequence[fx.Node], members: Sequence[fx.Node]) -> None:
    """New ``nodes`` stand for ``members``: they belong to the innermost module that holds all of theirs."""
    found = [provenance(m) for m in members]
    levels = zip(*(f.path.split(".") for f in found), strict=False)
    path = ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, levels))
    for node in nodes:
        set_provenance(node, found[0]._replace(path=path))


def erase_chain(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what was made for it alone."""
    queue = [node]
    while queue:
        current = queue.pop()
        if current.op == "call_function" and not current.users:
            queue += current.all_input_nodes
            graph.erase_node(current)


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


def seconds(node: fx.Node) -> float:
    """A rough forecast of the time that the collective takes on one H200 host."""
    return LATENCY_S + bytes_sent(node) / _LINK_BYTES_PER_S


def exchanging(graph: fx.Graph) -> frozenset[str]:
    """Names of the groups in which the graph's nodes communicate without NCCL (see `kernels.comm.exchange`)."""
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


class Pipeline(NamedTuple):
    """What a product in a pipeline with a collective costs besides the product.

    ``sent``: bytes that this rank receives from the ``ranks - 1`` others while it multiplies. ``copied``: bytes that
    it moves in its own memory, and ``barriers``: how often ranks wait for a flag. ``kernels``: that chunks and flags
    take more.
    """

    group: str
    ranks: int
    sent: int
    copied: int
    barriers: int
    kernels: int

    def exposed_seconds(self, compute: float, link: float, memory: float) -> float:
        """Seconds beyond ``compute``, those of the products; ``link``, ``memory``: bytes/s.

        The other ranks' chunks arrive, or leave, while all chunks but one are multiplied: the pipeline starts with
        this rank's own chunk, and a reduction ends with it.
        """
        hidden = compute * (self.ranks - 1) / self.ranks
        fixed = self.barriers * _BARRIER_S + self.kernels * _KERNEL_S
        return fixed + self.copied / memory + max(0.0, self.sent / link - hidden)


def pipeline_of(node: fx.Node) -> Pipeline | None:
    """The pipeline that ``node`` runs; None where it is no product joined with a collective."""
    if node.target is ALL_GATHER_MATMUL:
        shard, weights, keep, ranks, group = node.args
        # Copies run beside the products; of several sequences the whole, put together, is copied once more.
        size, batch = tensor_bytes(shard), shard.meta["val"].shape[0]
        whole = 2 * ranks * size if keep and batch > 1 else 0
        kernels = ranks - 1 + _pieces(ranks, batch, weights)
        return Pipeline(group, ranks, (ranks - 1) * size, whole, 1, kernels)
    if node.target is MATMUL_REDUCE_SCATTER:
        lefts, _, batch, ranks, group = node.args
        size, kernels = tensor_bytes(node), ranks - 1 + 1 + _pieces(ranks, batch, lefts)
        return Pipeline(group, ranks, (ranks - 1) * size, (ranks + 1) * size, 1, kernels)  # the sum reads all parts
    return None


def _pieces(ranks: int, batch: int, products: Sequence[fx.Node]) -> int:
    """Into how many more kernels a pipeline cuts ``products``."""
    return len(products) * (ranks * batch - 1)


def joined_saves(node: fx.Node, bytes_sent: float) -> float:
    """Seconds that the products and the collective of ``node``, as one pipeline, are forecast to save; ``bytes_sent``:
    of the collective by itself, see `bytes_sent`."""
    apart = LATENCY_S + bytes_sent / _LINK_BYTES_PER_S
    return apart - pipeline_of(node).exposed_seconds(_compute_seconds(node), _LINK_BYTES_PER_S, _BYTES_PER_S)


class Builder:
    """Adds nodes at one place of a graph, with their fake values, in the name of ``members``."""

    def __init__(self, step: StepGraph, members: Sequence[fx.Node]):
        self.step, self.members = step, members

    def __call__(self, target: Callable, *args: object, like: fx.Node | None = None, **kwargs: object) -> fx.Node:
        node = self.step.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        attribute(self.step, [node], [like] if like else self.members)
        return node


def exposed(graph: fx.Graph) -> tuple[float, float]:
    """(seconds that compute waits for communication, seconds of communication), as one step is forecast to run.

    A rough forecast for one H200 host: kernels at the rate of memory or of matrix products, one after the other, and
    the collectives of each group one after the other beside them. Of products in a pipeline with a collective the
    first number has what exceeds the product, the second the whole transfer.
    """
    now = waited = total = 0.0
    free: dict[str, float] = defaultdict(float)
    done: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node.target in (*COLLECTIVES, GATHER_BEGIN, REDUCE_BEGIN):
            group, took = node.args[-1], seconds(node)
            done[node] = free[group] = max(now, free[group]) + took
            total += took
        elif node.target in (WAIT, GATHER_END, REDUCE_END) and node.args[0] in done:
            ready = done[node.args[0]]
            waited += max(0.0, ready - now)
            now = max(now, ready)
        elif pipeline := pipeline_of(node):
            computing = _compute_seconds(node)
            beyond = pipeline.exposed_seconds(computing, _LINK_BYTES_PER_S, _BYTES_PER_S)
            now += computing + beyond
            waited += beyond
            total += LATENCY_S + pipeline.sent / _LINK_BYTES_PER_S
        elif is_overload(node) and not is_view(node):
            now += _compute_seconds(node)
    return waited, total


def _compute_seconds(node: fx.Node) -> float:
    moved = tensor_bytes(node) + sum(tensor_bytes(n) for n in node.all_input_nodes)
    return max(moved / _BYTES_PER_S, flops(node) / _FLOPS_PER_S)


def exposed_text(before: tuple[float, float], after: tuple[float, float]) -> str:
    """The line of a report that compares two of `exposed`."""
    return (
        f"exposed communication, roughly forecast for one H200 host: {before[0] * 1e3:.2f} ms of {before[1] * 1e3:.2f} "
        f"before, {after[0] * 1e3:.2f} ms of {after[1] * 1e3:.2f} after"
    )

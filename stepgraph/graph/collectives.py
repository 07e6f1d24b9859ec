"""A graph's collectives: one table of their operators, and which of them gather parameters and reduce gradients.

What a collective is for is its role (see `stepgraph.graph.provenance`). A *region* is a block that the model declares,
or what lies outside blocks between two of them (the embedding; the last norm and the head).
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import fx

import stepgraph.kernels.comm.async_matmul
import stepgraph.kernels.comm.copy_collectives  # noqa: F401  (both register their operators)
from stepgraph import compat
from stepgraph.graph.facts import argument, flops, is_overload, is_view, tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance, role_of, set_provenance, together
from stepgraph.graph.step_graph import StepGraph

c10d = torch.ops._c10d_functional
ours = torch.ops.stepgraph

ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
WAIT = c10d.wait_tensor.default

ALL_GATHER_MATMUL = ours.all_gather_matmul.default
MATMUL_REDUCE_SCATTER = ours.matmul_reduce_scatter.default

GATHER_BEGIN = ours.gather_begin.default
GATHER_END = ours.gather_end.default
REDUCE_BEGIN = ours.reduce_begin.default
REDUCE_END = ours.reduce_end.default


class Operator(NamedTuple):
    """A collective operator.

    ``kind``: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``; ``""``: that of what
    it waits for. ``stage``: ``begin`` (it travels while others compute), ``wait`` or ``end`` (computation waits until
    it is there: the former does nothing else, the latter also puts results together) or ``joined`` (it travels while
    the same node multiplies). ``exchange``: between ranks' memories, without NCCL (see `stepgraph.kernels.exchange`).
    """

    kind: str
    stage: str
    exchange: bool = False


_KINDS = {
    "all_gather": ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
    "all_reduce": ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast", "broadcast_"),
}
#: Every operator that communicates between ranks. Each but the wait names its group in an argument ``group_name``.
OPERATORS: dict[object, Operator] = {
    **{getattr(c10d, name).default: Operator(kind, "begin") for kind, names in _KINDS.items() for name in names},
    WAIT: Operator("", "wait"),
    GATHER_BEGIN: Operator("all_gather", "begin", exchange=True),
    GATHER_END: Operator("all_gather", "end", exchange=True),
    REDUCE_BEGIN: Operator("reduce_scatter", "begin", exchange=True),
    REDUCE_END: Operator("reduce_scatter", "end", exchange=True),
    ALL_GATHER_MATMUL: Operator("all_gather", "joined", exchange=True),
    MATMUL_REDUCE_SCATTER: Operator("reduce_scatter", "joined", exchange=True),
}
#: Those that process groups run beside computation, and those of ours.
COLLECTIVES = tuple(op for op, found in OPERATORS.items() if found.stage == "begin" and not found.exchange)
EXCHANGES = tuple(op for op, found in OPERATORS.items() if found.exchange)


def operator_of(node: fx.Node) -> Operator | None:
    """The collective operator that ``node`` calls; None where it calls none."""
    return OPERATORS.get(node.target) if node.op == "call_function" else None


def stage_of(node: fx.Node) -> str | None:
    """The stage of the collective operator that ``node`` calls; None where it calls none."""
    found = operator_of(node)
    return found and found.stage


def is_nccl(node: fx.Node) -> bool:
    """Whether torch's process groups run the collective ``node`` (NCCL on GPUs, gloo on CPUs)."""
    found = operator_of(node)
    return found is not None and not found.exchange


def group_of(node: fx.Node) -> str:
    """What the collective ``node`` calls its process group: a name that is the same on all ranks."""
    return argument(node, "group_name")


def set_group(node: fx.Node, name: str) -> None:
    """The collective ``node`` calls its process group ``name``."""
    names = [parameter.name for parameter in node.target._schema.arguments]
    node.update_arg(names.index("group_name"), name)


def group_size(node: fx.Node) -> int:
    """Ranks of the collective's process group."""
    return argument(node, "group_size") or compat.process_group(group_of(node)).size()


def bytes_sent(node: fx.Node) -> float:
    """Bytes that a rank receives in the collective ``node`` (which begins one, or joins it with products), counted as a
    ring's."""
    ranks = group_size(node)
    kind = operator_of(node).kind
    if kind == "all_gather":
        return _gathered_bytes(node) * (ranks - 1) / ranks
    if kind == "reduce_scatter":
        return _scattered_bytes(node) * (ranks - 1)
    size = tensor_bytes(node)
    return {"all_reduce": 2 * size * (ranks - 1) / ranks, "all_to_all": size * (ranks - 1) / ranks, "broadcast": size}[
        kind
    ]


def _gathered_bytes(node: fx.Node) -> int:
    """Bytes of what all ranks' shards make."""
    if node.target is GATHER_BEGIN:
        _, sizes, dtype, ranks, _ = node.args
        return sum(sizes) * dtype.itemsize * ranks
    if node.target is ALL_GATHER_MATMUL:
        return tensor_bytes(node.args[0]) * group_size(node)
    return tensor_bytes(node)


def _scattered_bytes(node: fx.Node) -> float:
    """Bytes of a rank's part of the sum."""
    if node.target is REDUCE_BEGIN:
        return sum(map(tensor_bytes, node.args[0])) / group_size(node)
    return tensor_bytes(node)


def exchanging(graph: fx.Graph) -> frozenset[str]:
    """Names of the groups, as torch knows them, in which the graph's nodes communicate without NCCL."""
    exchanges = (node for node in graph.nodes if (found := operator_of(node)) and found.exchange)
    return frozenset(compat.group_name(group_of(node)) for node in exchanges)


def spans_machines(group: str, ranks_per_machine: int = 0) -> str | None:
    """Why ranks of a group cannot reach each other's memory, or None. ``ranks_per_machine``: neighbours that share a
    machine; 0: as torchrun started them."""
    ranks = dist.get_process_group_ranks(compat.process_group(group))
    there = ranks_per_machine or int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return None if len({rank // there for rank in ranks}) == 1 else "its ranks do not share a machine"


class Collective(NamedTuple):
    """A collective ``node`` and its ``wait``. ``half``: of the step, ``forward`` (with the loss) or ``backward``.
    ``region``: a number, in the order in which regions run."""

    node: fx.Node
    wait: fx.Node
    half: str
    region: int

    @property
    def form(self) -> tuple:
        """What must agree for collectives to become one: operator, dtype, and every argument but the tensor."""
        return (self.node.target, self.node.meta["val"].dtype, *self.node.args[1:])


def halves(graph: fx.Graph) -> dict[fx.Node, str]:
    """For every node of forward, loss and backward the half of the step that it is in: ``forward``, ``backward``."""
    half = {"forward": "forward", "loss": "forward", "backward": "backward"}
    return {node: half[phase] for node in graph.nodes if (phase := phase_of(node)) in half}


def gathers(step: StepGraph) -> list[Collective]:
    """All-gathers of parameters."""
    return _collectives(step, "gather", (ALL_GATHER,))


def reductions(step: StepGraph) -> list[Collective]:
    """Reduce-scatters and all-reduces of gradients."""
    return _collectives(step, "reduce", (REDUCE_SCATTER, ALL_REDUCE))


def tail(step: StepGraph) -> set[fx.Node]:
    """Nodes of backward that finish gradients: reductions, and what makes of their results what the optimizer reads.

    Nothing else of forward or backward reads a node of the tail, so that each may run later.
    """
    found = ((node, role_of(node)) for node in step.nodes("backward"))
    return {node for node, role in found if role and role.kind == "reduce"}


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


def _collectives(step: StepGraph, kind: str, operators: tuple) -> list[Collective]:
    half = halves(step.graph)
    found: list[Collective] = []
    region, last = 0, None
    numbers: dict[tuple, int] = {}
    for node, waits in _with_role(step.graph, kind, operators):
        if len(waits) != 1 or len(node.users) != 1 or node not in half:
            continue
        block = step.block_of(node)
        # A block comes once in forward and in backward, whatever lies between its parts; outside count runs.
        if block is None:
            region += last != (half[node], None)
            number = region
        else:
            if (half[node], block) not in numbers:
                region += 1
                numbers[half[node], block] = region
            number = numbers[half[node], block]
        last = (half[node], block)
        found.append(Collective(node, waits[0], half[node], number))
    return found


def _with_role(graph: fx.Graph, kind: str, operators: tuple) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Nodes of ``operators`` for a role of ``kind``, in order, with what waits for each."""
    for node in graph.nodes:
        if node.target in operators and (role := role_of(node)) and role.kind == kind:
            yield node, [user for user in node.users if user.target is WAIT]


def by_region(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """The collectives of each region in each half of the step, in order."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.half, c.region].append(c)
    return list(groups.values())


def attribute(step: StepGraph, nodes: Sequence[fx.Node], members: Sequence[fx.Node]) -> None:
    """New ``nodes`` stand for ``members``: see `provenance.together`."""
    for node in nodes:
        set_provenance(node, together([provenance(m) for m in members]))


def erase_chain(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what was made for it alone."""
    queue = [node]
    while queue:
        current = queue.pop()
        if current.op == "call_function" and not current.users:
            queue += current.all_input_nodes
            graph.erase_node(current)


# What the estimate of exposed communication assumes, for kernels and links of one H200 host: FLOP/s, bytes/s in
# memory, bytes/s between ranks and seconds that any collective takes. Only shares matter.
_FLOPS_PER_S, _BYTES_PER_S, _LINK_BYTES_PER_S, LATENCY_S = 700e12, 3.5e12, 350e9, 20e-6
# Seconds of a flag's way over NVLink, and that every kernel takes however little it does: one that waits for a flag
# took 3.4 us on H200s.
_BARRIER_S, _KERNEL_S = 5e-6, 4e-6


def seconds(node: fx.Node) -> float:
    """A rough forecast of the time that the collective takes on one H200 host."""
    return LATENCY_S + bytes_sent(node) / _LINK_BYTES_PER_S


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

"""A graph's collectives: one table of their operators, and which of them gather parameters and reduce gradients.

What a collective is for is its role (see `stepgraph.graph.provenance`). A *region* is a block that the model declares,
or what lies outside blocks between two of them (the embedding; the last norm and the head).
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import fx

import stepgraph.kernels.comm.async_matmul
import stepgraph.kernels.comm.copy_collectives
import stepgraph.kernels.comm.expert_rows
import stepgraph.kernels.comm.stage_sends  # noqa: F401  (all register their operators)
from stepgraph import compat
from stepgraph.graph.facts import argument, of_target, set_argument, tensor_bytes
from stepgraph.graph.provenance import phase_of, role_of
from stepgraph.graph.step_graph import StepGraph

c10d = torch.ops._c10d_functional
ours = torch.ops.stepgraph

ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default

ALL_GATHER_MATMUL = ours.all_gather_matmul.default
MATMUL_REDUCE_SCATTER = ours.matmul_reduce_scatter.default

GATHER_BEGIN = ours.gather_begin.default
GATHER_END = ours.gather_end.default
REDUCE_BEGIN = ours.reduce_begin.default
REDUCE_END = ours.reduce_end.default

COUNTS_BEGIN = ours.counts_begin.default
COUNTS_END = ours.counts_end.default
ROWS_BEGIN = ours.rows_begin.default
ROWS_END = ours.rows_end.default

SEND = ours.send.default
RECV = ours.recv.default


class Operator(NamedTuple):
    """A collective operator.

    ``kind``: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``; ``""``: that of what
    it waits for. ``stage``: ``begin`` (it runs while others compute), ``wait`` or ``end`` (computation waits until
    it is there: the former does nothing else, the latter also puts results together) or ``joined`` (it travels while
    the same node multiplies). ``exchange``: between ranks' memories, without NCCL (see `kernels.comm.exchange`).
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
    COUNTS_BEGIN: Operator("all_gather", "begin", exchange=True),
    COUNTS_END: Operator("all_gather", "end", exchange=True),
    ROWS_BEGIN: Operator("all_to_all", "begin", exchange=True),
    ROWS_END: Operator("all_to_all", "end", exchange=True),
    ALL_GATHER_MATMUL: Operator("all_gather", "joined", exchange=True),
    MATMUL_REDUCE_SCATTER: Operator("reduce_scatter", "joined", exchange=True),
}
#: Ours, which no process group runs.
EXCHANGES = tuple(op for op, found in OPERATORS.items() if found.exchange)


_operator = of_target(OPERATORS.get)


def operator_of(node: fx.Node) -> Operator | None:
    """The collective operator that ``node`` calls; None where it calls none."""
    return _operator(node.target) if node.op == "call_function" else None


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
    set_argument(node, "group_name", name)


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
    size = rows_bytes(node) if node.target is ROWS_BEGIN else tensor_bytes(node)
    return {"all_reduce": 2 * size * (ranks - 1) / ranks, "all_to_all": size * (ranks - 1) / ranks, "broadcast": size}[
        kind
    ]


def rows_bytes(node: fx.Node) -> int:
    """Bytes of the rows that an exchange of tokens' rows moves: as many as the tokens have, at most what experts
    have room for. ``node`` begins or ends it."""
    begin = node if node.target is ROWS_BEGIN else node.args[0]
    x, to, came = (argument(begin, name).meta["val"] for name in ("x", "to", "came"))
    return min(to.numel(), came.numel()) * x.shape[1] * x.element_size()


def _gathered_bytes(node: fx.Node) -> int:
    """Bytes of what all ranks' shards make."""
    if node.target is GATHER_BEGIN:
        _, sizes, dtype, ranks, _ = node.args
        return sum(sizes) * dtype.itemsize * ranks
    if node.target in (ALL_GATHER_MATMUL, COUNTS_BEGIN):
        return tensor_bytes(node.args[0]) * group_size(node)
    return tensor_bytes(node)


def _scattered_bytes(node: fx.Node) -> float:
    """Bytes of a rank's part of the sum."""
    if node.target is REDUCE_BEGIN:
        return sum(map(tensor_bytes, node.args[0])) / group_size(node)
    return tensor_bytes(node)


def exchanging(graph: fx.Graph) -> frozenset[str]:
    """Names of the groups, as torch knows them, in which the graph's nodes communicate without NCCL."""
    exchanges = (n for n in graph.nodes if box_of(n) or ((found := operator_of(n)) and found.exchange))
    return frozenset(compat.group_name(group_of(node)) for node in exchanges)


def box_of(node: fx.Node) -> list[int] | None:
    """The box of a message that ``node`` sends or receives over symmetric memory, None for others."""
    return argument(node, "box") if node.target in (SEND, RECV) else None


def boxes_of(graph: fx.Graph) -> Iterator[tuple[str, int, int, torch.device]]:
    """What the graph's messages over symmetric memory need: (group, places on each rank, bytes of each, device)."""
    for node in graph.nodes:
        if box := box_of(node):
            yield argument(node, "group_name"), *box[2:], node.meta["val"].device


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

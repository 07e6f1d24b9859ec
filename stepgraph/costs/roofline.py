"""Seconds of every kernel by the roofline: the longer of its arithmetic and its memory traffic, at what kernels reach.

Source: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model", 2009.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx

from stepgraph.costs import attention
from stepgraph.costs.experts import LEAVING, filled, is_grouped, reads_filled, rows_of
from stepgraph.costs.flops import flops, is_attention, is_fp8
from stepgraph.costs.hardware import (
    ASSUMED,
    ATTENTION_REACHED,
    FP8_REACHED,
    GRAM_REACHED,
    GROUPED_REACHED,
    PRODUCTS_REACHED,
    Gpu,
)
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.collectives import WAIT
from stepgraph.graph.facts import (
    is_mutating,
    is_pointwise,
    leaves_rest,
    of_target,
    ours,
    packet,
    returns_view,
    tensor_bytes,
)
from stepgraph.graph.host_copies import COPIES
from stepgraph.graph.marks import COMPILE
from stepgraph.graph.provenance import phase_of

aten = torch.ops.aten

#: Operators, apart from pointwise ones, that a generated kernel computes with what surrounds them.
_FUSIBLE = {
    aten.sum, aten.mean, aten.amax, aten.where, aten.masked_fill, aten.expand, aten.cat, aten.arange,
    aten.scalar_tensor, aten.ones_like, aten.zeros_like, aten.full_like, aten.full, aten.pow,
    aten.linalg_vector_norm, aten.gather, aten.stack, aten.silu_backward, aten._log_softmax,
    aten._log_softmax_backward_data, aten.slice_backward, aten.select_backward, aten.constant_pad_nd, ours.concat,
}  # fmt: skip

#: Phases whose nodes may run as late as what reads them.
_LATE = ("backward", "optimizer")

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
    its own. What backward or the update makes early for what it runs later alone, such as cheap nodes that it computes
    again, has the level of its first reader. A sum along columns is a kernel of its own where what it reads is in
    memory anyway.
    """

    def __init__(self, graph: fx.Graph, aliases: Aliases, fused: bool):
        self._parent: dict[fx.Node, fx.Node] = {}
        self.fused = fused
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
            elif node.target is aten.copy_.default and node.meta.get(COMPILE):
                self._unite(sources[1], node)  # an update written out: what it computes is stored only in the state
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
        if node in fusible and phase_of(node) in _LATE:
            level[node] = max(level[node], first.get(node, 0))
        if not is_free(node):
            for source in map(aliases.root, node.all_input_nodes):
                reads = level[node] if phase_of(node) in _LATE else 0
                first[source] = min(first.get(source, reads), reads)
    return level, fusible, stored & fusible


def _sums_columns(node: fx.Node) -> bool:
    """Whether the node sums over rows, as a bias's gradient does."""
    if packet(node) is not aten.sum or len(node.args) < 2 or not node.args[1]:
        return False
    rank = node.args[0].meta["val"].ndim
    return rank > 1 and all(dim % rank < rank - 1 for dim in node.args[1])


def _side(node: fx.Node) -> str:
    phase = phase_of(node)
    return "backward" if phase == "loss" else phase


#: Read only the rows that they return.
_looks_up = of_target({aten.embedding.default, aten.index.Tensor, aten.gather.default}.__contains__)


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype that ``node`` computes in, fp32 where its first result is not a tensor."""
    if is_fp8(node):
        return node.args[1].meta["val"].dtype  # the first side may be packed rows, which are bytes
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32


class Roofline:
    """``seconds[node]`` for every node that computes; a kernel of several is charged to the last of them. ``moved``:
    bytes of memory that the kernel reads and writes, likewise. ``flops``: of all. ``load``: rows that this rank's
    experts receive over the mean of all ranks. ``whole``: what ``graph`` was cut out of, where its tokens are routed;
    None: ``graph`` itself. ``launch_s``: seconds that each kernel takes beyond that, see `hardware.LAUNCH_S`; none
    where passes compare kernels that a compiler has not joined yet."""

    def __init__(
        self,
        graph: fx.Graph,
        aliases: Aliases,
        fusion: Fusion,
        gpu: Gpu,
        load: float = 1.0,
        whole: fx.Graph | None = None,
        launch_s: float = 0.0,
    ):
        self.seconds: dict[fx.Node, float] = {}
        self.moved: dict[fx.Node, int] = {}
        self.flops = 0
        kernels: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            free = is_free(node)
            if free and node.op != "output":
                continue
            if not free and not collectives.is_nccl(node):
                kernels[fusion.kernel(node)].append(node)
            for source in node.all_input_nodes if fusion.fused else ():
                readers[aliases.root(source)].append(node)
        shares = filled(graph if whole is None else whole, load)
        for members in kernels.values():
            work = sum(_work(node, shares) for node in members)
            self.flops += work
            copied = _copied(members[-1], load, shares)
            moved = _traffic(members, aliases, readers) if copied is None else copied
            self.moved[members[-1]] = moved
            self.seconds[members[-1]] = gpu.kernel_seconds(
                work, _dtype(members[-1]), moved, reached=min(_reached(node, gpu) for node in members)
            )
            if zeros := sum(_zeros(node, shares) for node in members):
                self.moved[members[-1]] += zeros
                self.seconds[members[-1]] += gpu.moving_seconds(zeros)
            if self.seconds[members[-1]]:
                self.seconds[members[-1]] += launch_s


def node_seconds(node: fx.Node, gpu: Gpu = ASSUMED) -> float:
    """Seconds of ``node`` as a kernel of its own, that reads its inputs whole and writes its results."""
    moved = tensor_bytes(node) + sum(map(tensor_bytes, node.all_input_nodes))
    return gpu.kernel_seconds(flops(node), _dtype(node), moved, reached=_reached(node, gpu))


def products_seconds(graph: fx.Graph, gpu: Gpu) -> float:
    """Seconds of all products and attention of ``graph`` at the published FLOP/s of ``gpu``."""
    return sum(work / gpu.peak(_dtype(node)) for node in graph.nodes if (work := flops(node)))


def limits(graph: fx.Graph, gpu: Gpu) -> dict[str, float]:
    """Seconds of all ``products`` and of all ``attention`` of ``graph`` at the share of ``gpu``'s FLOP/s that was
    measured of such kernels: a step with nothing else takes no less."""
    shares, found = filled(graph), {"products": 0.0, "attention": 0.0}
    for node in graph.nodes:
        if work := _work(node, shares):
            kind = "attention" if is_attention(node) else "products"
            found[kind] += work / gpu.peak(_dtype(node)) / _reached(node, gpu)
    return found


def _work(node: fx.Node, shares: Mapping[int, float]) -> int:
    """FLOPs of ``node``; ``shares``: of experts' buffers, how much of them is filled."""
    return round(flops(node) * shares.get(rows_of(node), 1.0)) if is_grouped(node) else flops(node)


def _zeros(node: fx.Node, shares: Mapping[int, float]) -> int:
    """Bytes of zeros after the rows of a grouped product, which a kernel of their own writes."""
    products = (torch.ops.stepgraph.grouped_mm.default, torch.ops.stepgraph.grouped_scaled_mm.default)
    if node.target not in products or leaves_rest(node):
        return 0
    return round((1.0 - shares.get(rows_of(node), 1.0)) * tensor_bytes(node))


def _reached(node: fx.Node, gpu: Gpu) -> float:
    """The share of ``gpu``'s FLOP/s that ``node`` reaches."""
    if is_fp8(node):
        return FP8_REACHED
    if is_attention(node):
        return attention.reached(node, gpu) or ATTENTION_REACHED
    if node.target is torch.ops.stepgraph.gram.default:
        return GRAM_REACHED
    return GROUPED_REACHED if is_grouped(node) else PRODUCTS_REACHED


def _copied(node: fx.Node, load: float, shares: Mapping[int, float]) -> int | None:
    """Bytes that kernels move where a collective between ranks' memories begins or ends, and of a kernel that reads the
    filled rows of experts alone; None for other nodes. ``load``: as of `Roofline`, ``shares``: as of `_work`."""
    if reads_filled(node.target):
        share, read = shares.get(rows_of(node), 1.0), sum(map(tensor_bytes, node.all_input_nodes))
        return round(share * read) + round(_written(node, share) * tensor_bytes(node))
    if node.target is collectives.GATHER_BEGIN:
        shards, sizes, dtype, *_ = node.args
        return sum(map(tensor_bytes, shards)) + sum(sizes) * dtype.itemsize
    if node.target is collectives.GATHER_END:
        _, sizes, dtype, ranks, _ = node.args
        return 2 * (ranks - 1) * sum(sizes) * dtype.itemsize
    if node.target in (collectives.REDUCE_BEGIN, collectives.COUNTS_BEGIN, collectives.ROWS_BEGIN):
        return 0
    if node.target is collectives.REDUCE_END:
        return sum(map(tensor_bytes, node.args[1])) + tensor_bytes(node)
    if node.target is collectives.ROWS_END:  # rows that came, and zeros after them
        share = min(load * collectives.rows_bytes(node) / max(tensor_bytes(node), 1), 1.0)
        return round((share + _written(node, share)) * tensor_bytes(node))
    return None


def _written(node: fx.Node, share: float) -> float:
    """The share of its result that a kernel writes which reads the ``share`` of rows that are filled."""
    return share if leaves_rest(node) or node.target in LEAVING else 1.0


def _traffic(members: list[fx.Node], aliases: Aliases, readers: dict[fx.Node, list[fx.Node]]) -> int:
    """Bytes that a kernel reads and writes; it does not write what only its own nodes read."""
    inside = set(members)
    read: dict[fx.Node, int] = {}
    written = 0
    for node in members:
        for source in node.all_input_nodes:
            root = aliases.root(source)
            if root not in inside:
                # A broadcast reads each element once, a slice only what it shows.
                part = min(tensor_bytes(source), tensor_bytes(root))
                read[root] = max(read.get(root, 0), min(part, tensor_bytes(node)) if _looks_up(node.target) else part)
        if is_mutating(node) and not (len(members) > 1 and node.target is aten.mul_.Tensor):  # clipped in the update
            written += sum(tensor_bytes(n) for n in written_arguments(node))
        if aliases.root(node) is node and not (len(members) > 1 and inside.issuperset(readers[node])):
            written += tensor_bytes(node)
    return sum(read.values()) + written

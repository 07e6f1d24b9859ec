"""Seconds of communication: NCCL's collectives, copies by the copy engines, and products pipelined with collectives.

NCCL's collectives follow an alpha-beta model: a latency by number of ranks and nodes, plus bytes over the bandwidth of
the slowest link or over what the kernels themselves can pass on, whichever takes longer. They run on rings, an
all-reduce also on a tree between nodes, in the cheaper of two protocols: Simple, which reaches full bandwidth, and LL,
which sends a flag with every four bytes of data and so reaches half of it, at lower latency. An all-to-all sends to all
peers at once: its parts for the same node over NVLink, all others over the rank's own adapter.

Source for the latencies: NCCL 2.27, src/graph/tuning.cc, ``baseLatencies`` and ``hwLatencies``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.costs.hardware import ASSUMED, FLAG_S, GPUS_PER_NODE, SHORT_KERNEL_S, Gpu
from stepgraph.graph import collectives
from stepgraph.graph.facts import tensor_bytes

#: Operators that communicate, and the words for them in reports.
KINDS = {
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_TO_ALL: "all_to_all",
    collectives.GATHER_BEGIN: "all_gather by copies",
    collectives.REDUCE_BEGIN: "reduce_scatter by copies",
    collectives.COUNTS_BEGIN: "all_gather of counts",
    collectives.ROWS_BEGIN: "all_to_all of rows",
    collectives.ALL_GATHER_MATMUL: "all_gather + mm",
    collectives.MATMUL_REDUCE_SCATTER: "mm + reduce_scatter",
}
_COPIES = (collectives.GATHER_BEGIN, collectives.REDUCE_BEGIN)

# Seconds: once for each collective, for each step over NVLink and over the network; and the share of bandwidth reached.
_RING = ((8.4e-6, 3.4e-6, 14.0e-6, 1.0), (6.6e-6, 0.6e-6, 2.7e-6, 0.5))  # Simple, LL
_TREE = ((8.4e-6, 4.0e-6, 14.0e-6, 1.0), (6.8e-6, 0.6e-6, 5.0e-6, 0.5))

#: What NCCL's kernels pass on, keep or add up in a second, over a GPU's NVLink bandwidth: among few ranks they are
#: slower than the links. Source: two idle H200s, 1 GiB: 539 GB/s (all-gather), 529 (reduce-scatter), 497
#: (all-reduce) of 450 (benchmarks/h200_x2_roofline.json).
_KERNEL_SHARE = 1.18

#: Seconds that a collective by copy engines takes besides its transfer: the ranks wait for each other's flags.
COPIES_S = 20e-6

#: The same of an exchange in our kernels: one waits, one writes, one signals, and a flag is on its way. Not measured.
WRITES_S = 3 * SHORT_KERNEL_S + FLAG_S


#: What our kernels write of expert rows in a second, over a GPU's NVLink bandwidth. Source: the combines of DeepSeek-V3
#: 16B on two H200s, 96 MiB to the other GPU in 306 us.
_ROWS_SHARE = 0.73


class Group(NamedTuple):
    """A process group as plain data. ``axis``: the name that reports use. ``ranks``: of the world."""

    axis: str
    ranks: tuple[int, ...]


def groups(axes: Mapping[str, dist.ProcessGroup]) -> dict[str, Group]:
    """The process groups ``axes``, by name of the axis, and the ``world``; by their own names."""
    named = {"world": dist.group.WORLD} | dict(axes)
    return {g.group_name: Group(axis, tuple(dist.get_process_group_ranks(g))) for axis, g in named.items()}


def groups_of(nodes: Iterable[fx.Node]) -> dict[str, Group]:
    """The process groups that ``nodes`` communicate in, by their own names."""
    found = {
        group_name(node): collectives.group_of(node)
        for node in nodes
        if collectives.stage_of(node) in ("begin", "joined")
    }
    ranks = {name: dist.get_process_group_ranks(compat.process_group(name)) for name in found}
    return {name: Group(axis, tuple(ranks[name])) for name, axis in found.items()}


def group_name(node: fx.Node) -> str:
    """torch's own name of the process group that ``node`` communicates in."""
    return compat.group_name(collectives.group_of(node))


class Transfer(NamedTuple):
    """What a collective moves. ``bytes``: of the whole tensor, the larger side: what an all-gather returns and what a
    reduce-scatter takes."""

    kind: str
    dtype: torch.dtype
    bytes: int
    seconds: float


def transfer(node: fx.Node, ranks: Sequence[int], gpu: Gpu, load: float = 1.0) -> Transfer:
    """What the collective ``node`` moves between ``ranks``. An operator that is not in the table goes by its own name,
    and as much data as an all-gather of its size. ``load``: rows that this rank's experts receive over the mean of all
    ranks, where only existing rows are sent."""
    if node.target in _COPIES:
        n, sent = len(ranks), collectives.bytes_sent(node)
        dtype = node.args[2] if node.target is collectives.GATHER_BEGIN else node.args[0][0].meta["val"].dtype
        return Transfer(KINDS[node.target], dtype, int(sent * n / (n - 1)), COPIES_S + sent / gpu.nvlink)
    if node.target in (collectives.COUNTS_BEGIN, collectives.ROWS_BEGIN):
        factor, share = (load, _ROWS_SHARE) if node.target is collectives.ROWS_BEGIN else (1.0, 1.0)
        n, sent = len(ranks), collectives.bytes_sent(node) * factor
        dtype = node.args[0].meta["val"].dtype
        return Transfer(KINDS[node.target], dtype, round(sent * n / (n - 1)), WRITES_S + sent / (share * gpu.nvlink))
    kind = KINDS.get(node.target) or node.target.overloadpacket.__name__
    value = node.meta["val"]
    dtype = (value[0] if isinstance(value, (list, tuple)) else value).dtype
    nbytes = max(tensor_bytes(node), sum(map(tensor_bytes, node.all_input_nodes)))
    return Transfer(kind, dtype, nbytes, collective_seconds(gpu, kind, nbytes, ranks))


def seconds(node: fx.Node, gpu: Gpu = ASSUMED) -> float:
    """Seconds of the collective ``node`` alone, between the ranks of its process group."""
    (group,) = groups_of([node]).values()
    return transfer(node, group.ranks, gpu).seconds


def collective_seconds(gpu: Gpu, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Seconds of NCCL's collective of ``kind`` (``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``)
    over ``ranks``.

    ``nbytes``: of the whole tensor, see `Transfer`.
    """
    n, nodes = len(ranks), len({rank // GPUS_PER_NODE for rank in ranks})
    if n == 1:
        return 0.0
    if kind == "all_to_all":
        return _all_to_all_seconds(gpu, nbytes, n, nodes)
    rounds = 2 if kind == "all_reduce" else 1
    # Each rank passes on all parts but one; between nodes, rings use the adapters of all the group's ranks there.
    over_nvlink = nbytes * (n - 1) / n / gpu.nvlink
    over_network = nbytes * (nodes - 1) / nodes / (n / nodes * gpu.network)
    # A kernel touches every part once, and in an all-reduce all parts but one again.
    by_kernel = nbytes * (2 - 1 / n if rounds == 2 else 1) / rounds / (_KERNEL_SHARE * gpu.nvlink)
    transfer = max(over_nvlink if n > nodes else 0.0, over_network, by_kernel)

    def cheapest(protocols: tuple, steps: float, hops: float) -> float:
        costs = (base + rounds * (steps * step + hops * hop + transfer / share) for base, step, hop, share in protocols)
        return min(costs)

    ring = cheapest(_RING, n - nodes, nodes - 1)
    if kind != "all_reduce":
        return ring
    return min(ring, cheapest(_TREE, n / nodes - 1, math.ceil(math.log2(nodes))))


def _all_to_all_seconds(gpu: Gpu, nbytes: int, n: int, nodes: int) -> float:
    """Seconds of an all-to-all of ``n`` ranks, evenly over ``nodes``: each sends ``nbytes / n`` to each other."""
    here = n / nodes
    by_kernel = nbytes / (_KERNEL_SHARE * gpu.nvlink)
    took = max(nbytes * (here - 1) / n / gpu.nvlink, nbytes * (n - here) / n / gpu.network, by_kernel)
    return min(base + step + (nodes > 1) * hop + took / share for base, step, hop, share in _RING)


class Pipeline(NamedTuple):
    """What a product pipelined with a collective costs besides the product.

    ``sent``: bytes that this rank receives from the ``ranks - 1`` others while it multiplies. ``copied``: bytes that
    it moves in its own memory. ``barriers``: how often ranks wait for a flag. ``kernels``: how many more there are, for
    chunks and flags.
    """

    ranks: int
    sent: int
    copied: int
    barriers: int
    kernels: int

    def exposed_seconds(self, compute: float, gpu: Gpu) -> float:
        """Seconds beyond ``compute``, those of the products.

        The other ranks' chunks arrive, or leave, while all chunks but one are multiplied: the pipeline starts with
        this rank's own chunk, and a reduction ends with it.
        """
        hidden = compute * (self.ranks - 1) / self.ranks
        fixed = self.barriers * FLAG_S + self.kernels * SHORT_KERNEL_S
        return fixed + gpu.moving_seconds(self.copied) + max(0.0, self.sent / gpu.nvlink - hidden)


def pipeline_of(node: fx.Node) -> Pipeline | None:
    """The pipeline that ``node`` runs; None where it is not a product joined with a collective."""
    if node.target is collectives.ALL_GATHER_MATMUL:
        shard, weights, keep, ranks, _ = node.args
        # Copies overlap with the products; several sequences are joined by one more copy.
        size, batch = tensor_bytes(shard), shard.meta["val"].shape[0]
        whole = 2 * ranks * size if keep and batch > 1 else 0
        kernels = ranks - 1 + _pieces(ranks, batch, weights)
        return Pipeline(ranks, (ranks - 1) * size, whole, 1, kernels)
    if node.target is collectives.MATMUL_REDUCE_SCATTER:
        lefts, _, batch, ranks, _ = node.args
        size, kernels = tensor_bytes(node), ranks - 1 + 1 + _pieces(ranks, batch, lefts)
        return Pipeline(ranks, (ranks - 1) * size, (ranks + 1) * size, 1, kernels)  # the sum reads all parts
    return None


def _pieces(ranks: int, batch: int, products: Sequence[fx.Node]) -> int:
    """Into how many more kernels a pipeline cuts ``products``."""
    return len(products) * (ranks * batch - 1)

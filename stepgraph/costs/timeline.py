"""When every node runs: one compute stream in the graph's order, one stream for each process group's collectives.

A collective starts when what it reads is computed and its group's earlier collectives are done; a wait holds the
compute stream until its collective is done, and that time is the collective's exposed time. A product in a pipeline
with a collective holds the compute stream for what the pipeline takes longer than the product.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.costs.hardware import REACHED, Gpu, collective_seconds
from stepgraph.graph.collectives import (
    GATHER_BEGIN,
    LATENCY_S,
    Pipeline,
    bytes_sent,
    group_of,
    is_nccl,
    pipeline_of,
    stage_of,
)
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.parallel import Mesh

#: Operators to the words that the report uses.
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_gather_matmul": "all_gather + mm",
    "matmul_reduce_scatter": "mm + reduce_scatter",
    "gather_begin": "all_gather by copies",
    "reduce_begin": "reduce_scatter by copies",
}


@dataclass
class Collective:
    """One collective: ``bytes`` of the whole tensor (what an all-gather returns, what a reduce-scatter takes), seconds
    by themselves, and those that computation waits for. ``axis``: of the mesh, or ``world``."""

    node: str
    kind: str
    axis: str
    ranks: int
    phase: str
    path: str
    dtype: str
    bytes: int
    seconds: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The simulated step: its collectives in order, seconds of the whole, and seconds of computation alone."""

    collectives: list[Collective]
    step_seconds: float
    compute_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """Seconds that computation waits for collectives."""
        return sum(c.exposed_seconds for c in self.collectives)


def group_axes(mesh: Mesh) -> dict[str, str]:
    """The mesh's axis of every process group, by the group's name."""
    axes = {dist.group.WORLD.group_name: "world"}
    return axes | {mesh.axis(name).get_group().group_name: name for name in mesh.names}


def collective_of(node: fx.Node, axes: dict[str, str], ranks: dict[str, list[int]], gpu: Gpu) -> Collective | None:
    """What ``node`` communicates; None where it does not."""
    if stage_of(node) != "begin":
        return None
    copies = not is_nccl(node)
    kind, group = _KINDS[node.target.overloadpacket.__name__], compat.group_name(group_of(node))
    n = len(ranks[group])
    if copies:
        nbytes = int(bytes_sent(node) * n / (n - 1))
        dtype = node.args[2] if node.target is GATHER_BEGIN else node.args[0][0].meta["val"].dtype
        seconds = LATENCY_S + bytes_sent(node) / gpu.nvlink
    else:
        nbytes, dtype = max(tensor_bytes(node), tensor_bytes(node.args[0])), node.meta["val"].dtype
        seconds = collective_seconds(gpu, kind, nbytes, ranks[group])
    found = provenance(node)
    return Collective(
        node.name,
        kind,
        axes[group],
        n,
        phase_of(node),
        found.path if found else "",
        str(dtype).removeprefix("torch."),
        nbytes,
        seconds,
    )


def _pipelined(node: fx.Node, pipeline: Pipeline, axes: dict[str, str], gpu: Gpu, products: float) -> Collective:
    """The collective inside ``node``, whose products take ``products`` seconds by themselves."""
    (first, *_) = node.all_input_nodes
    found = provenance(node)
    return Collective(
        node.name,
        _KINDS[node.target.overloadpacket.__name__],
        axes[compat.group_name(pipeline.group)],
        pipeline.ranks,
        phase_of(node),
        found.path if found else "",
        str(first.meta["val"].dtype).removeprefix("torch."),
        pipeline.sent * pipeline.ranks // (pipeline.ranks - 1),
        pipeline.sent / gpu.nvlink,
        pipeline.exposed_seconds(products, gpu.nvlink, REACHED * gpu.bandwidth),
    )


def simulate(graph: fx.Graph, seconds: dict[fx.Node, float], mesh: Mesh, gpu: Gpu) -> Schedule:
    """Run ``graph`` on paper; ``seconds``: of every node that computes."""
    axes = group_axes(mesh)
    groups = {mesh.axis(name).get_group() for name in mesh.names} | {dist.group.WORLD}
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in groups}
    now, busy = 0.0, 0.0
    free_at: dict[str, float] = {}
    running: dict[fx.Node, tuple[Collective, float]] = {}
    collectives = []
    for node in graph.nodes:
        if collective := collective_of(node, axes, ranks, gpu):
            now += seconds.get(node, 0.0)  # casts that copies begin with
            busy += seconds.get(node, 0.0)
            end = max(now, free_at.get(collective.axis, 0.0)) + collective.seconds
            free_at[collective.axis] = end
            running[node] = collective, end
            collectives.append(collective)
        elif stage_of(node) in ("wait", "end"):
            collective, end = running[node.args[0]]
            collective.exposed_seconds = max(0.0, end - now)
            now = max(now, end) + seconds.get(node, 0.0)
            busy += seconds.get(node, 0.0)
        elif pipeline := pipeline_of(node):
            collectives.append(_pipelined(node, pipeline, axes, gpu, seconds[node]))
            now += seconds[node] + collectives[-1].exposed_seconds
            busy += seconds[node]
        else:
            now += seconds.get(node, 0.0)
            busy += seconds.get(node, 0.0)
    return Schedule(collectives, max([now, *free_at.values()]), busy)

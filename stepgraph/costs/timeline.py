"""When every node runs: one compute stream in the graph's order, one stream for each process group's collectives.

A collective starts when what it reads is computed and its group's earlier collectives are done; a wait holds the
compute stream until its collective is done, and that time is the collective's exposed time. A product pipelined with a
collective holds the compute stream for as long as the pipeline takes beyond the product. Copies to the host, and copies
back, have a stream each.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.hardware import ASSUMED, Gpu, host_copy_seconds
from stepgraph.costs.links import Group
from stepgraph.costs.roofline import Fusion, Roofline, node_seconds
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import stage_of
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import OFFLOAD_BEGIN, OFFLOAD_END, RELOAD_BEGIN, RELOAD_END, STORE_BEGIN, STORE_END
from stepgraph.graph.provenance import phase_of, provenance, region_of


@dataclass
class Collective:
    """One collective: ``bytes`` of the whole tensor (what an all-gather returns, what a reduce-scatter takes), its
    seconds alone, and the ones that computation waits for it. ``axis``: of the mesh, or ``world``. ``role``: its kind
    (see `graph.provenance.Role`), ``""`` for none. ``region``: the user's name for it.

    When it happens, in seconds of its graph's call: what it reads is there (``ready_s``), the compute stream begins it
    (``launched_s``), its group's stream is free and it travels (``started_s``), computation needs it (``waited_s``).
    ``wait``: the node that waits for it; itself where it is joined with products.
    """

    node: str
    kind: str
    axis: str
    ranks: int
    phase: str
    path: str
    dtype: str
    bytes: int
    seconds: float
    role: str = ""
    region: str = ""
    exposed_seconds: float = 0.0
    ready_s: float = 0.0
    launched_s: float = 0.0
    started_s: float = 0.0
    waited_s: float | None = None
    wait: str = ""


@dataclass
class HostCopy:
    """A copy of ``bytes`` of a result of module ``path`` to the host (``back``: from it): its seconds alone, and those
    that computation waits for it."""

    node: str
    path: str
    back: bool
    bytes: int
    seconds: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The simulated graph: its collectives in order, seconds of the whole, and seconds of computation alone.
    ``copies``: to the host and back, in order.
    ``regions``: those of computation by the user's regions and phase, ``""`` outside all. ``starts``: when each node
    that computes begins, by name; of a schedule of several graphs nothing."""

    collectives: list[Collective]
    step_seconds: float
    compute_seconds: float
    regions: dict[tuple[str, str], float] = field(default_factory=dict)
    starts: Mapping[str, float] = field(default_factory=dict)
    copies: list[HostCopy] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that computation waits for collectives."""
        return sum(c.exposed_seconds for c in self.collectives)


def simulate(
    graph: fx.Graph, seconds: Mapping[fx.Node, float], gpu: Gpu, groups: Mapping[str, Group], load: float = 1.0
) -> Timeline:
    """Run ``graph`` on paper. ``seconds``: of every node that computes; ``groups``: by name, see `links.groups`.
    ``load``: rows that this rank's experts receive over the mean of all ranks."""
    now = busy = 0.0
    free_at: dict[str, float] = {}
    running: dict[fx.Node, tuple[Collective, float]] = {}
    collectives = []
    copies: dict[fx.Node, tuple[HostCopy, float]] = {}
    regions: dict[tuple[str, str], float] = defaultdict(float)
    starts: dict[str, float] = {}
    there: dict[fx.Node, float] = {}  # when each result is
    for node in graph.nodes:
        computing, stage, start = seconds.get(node, 0.0), stage_of(node), now
        ready = max((there[source] for source in node.all_input_nodes), default=0.0)
        if stage == "begin":
            now += computing  # casts that copies begin with
            group = links.group_name(node)
            kind, dtype, nbytes, took = links.transfer(node, groups[group].ranks, gpu, load)
            collective = _collective(node, kind, groups[group], dtype, nbytes, took)
            collective.ready_s, collective.launched_s = ready, now
            collective.started_s = max(now, free_at.get(group, 0.0))
            end = free_at[group] = collective.started_s + took
            running[node] = collective, end
            collectives.append(collective)
        elif node.target in (OFFLOAD_BEGIN, RELOAD_BEGIN, STORE_BEGIN):
            back = node.target is RELOAD_BEGIN
            size = tensor_bytes(node if back else node.args[0])
            found, stream = provenance(node), f"host {back}"
            copy = HostCopy(node.name, found.path if found else "", back, size, host_copy_seconds(size))
            free_at[stream] = max(now, free_at.get(stream, 0.0)) + copy.seconds
            copies[node] = copy, free_at[stream]
        elif node.target in (OFFLOAD_END, RELOAD_END, STORE_END) and node.args[0] in copies:
            copy, end = copies[node.args[0]]
            copy.exposed_seconds = max(0.0, end - now)
            now = max(now, end)
        elif stage in ("wait", "end") and node.args[0] in running:
            collective, end = running[node.args[0]]
            collective.exposed_seconds = max(0.0, end - now)
            collective.waited_s, collective.wait = now, node.name
            start = max(now, end)
            now = start + computing
        elif pipeline := links.pipeline_of(node):
            (first, *_), n = node.all_input_nodes, pipeline.ranks
            whole, took = pipeline.sent * n // (n - 1), pipeline.sent / gpu.nvlink
            collective = _collective(
                node, links.KINDS[node.target], groups[links.group_name(node)], first.meta["val"].dtype, whole, took
            )
            collective.exposed_seconds = pipeline.exposed_seconds(computing, gpu)
            collective.ready_s, collective.wait = ready, node.name
            collective.launched_s = collective.started_s = collective.waited_s = now
            collectives.append(collective)
            now += computing + collective.exposed_seconds
        else:
            now += computing
        if computing:
            busy += computing
            regions[region_of(node), phase_of(node)] += computing
            starts[node.name] = start
        # A result that costs nothing is ready as soon as its inputs.
        there[node] = now if computing or stage else ready
    moved = [copy for copy, _ in copies.values()]
    return Timeline(collectives, max([now, *free_at.values()]), busy, dict(regions), starts, moved)


def _collective(node: fx.Node, kind: str, group: Group, dtype: torch.dtype, nbytes: int, seconds: float) -> Collective:
    found = provenance(node)
    path, region, role = (found.path, found.region, found.role) if found else ("", "", None)
    return Collective(
        *(node.name, kind, group.axis, len(group.ranks), phase_of(node), path, str(dtype).removeprefix("torch.")),
        *(nbytes, seconds, role.kind if role else "", region),
    )


# The costs that passes ask for, on the GPU that decisions assume; mostly of kernels before fusion.


def assumed_seconds(graph: fx.Graph, fused: bool = False) -> dict[fx.Node, float]:
    """Seconds of every node that computes. ``fused``: as a compiler joins them."""
    aliases = Aliases(graph)
    return Roofline(graph, aliases, Fusion(graph, aliases, fused), ASSUMED).seconds


def assumed_timeline(graph: fx.Graph, fused: bool = False) -> Timeline:
    """One step as it is forecast to run."""
    return simulate(graph, assumed_seconds(graph, fused), ASSUMED, links.groups_of(graph.nodes))


def exposed(graph: fx.Graph) -> tuple[float, float]:
    """(seconds that computation waits for communication, seconds of communication), as one step is forecast to run."""
    timeline = assumed_timeline(graph)
    return timeline.exposed_seconds, sum(c.seconds for c in timeline.collectives)


def exposed_text(before: tuple[float, float], after: tuple[float, float]) -> str:
    """The line of a report that compares two of `exposed`."""
    return (
        f"exposed communication, forecast for {ASSUMED.name} GPUs: {before[0] * 1e3:.2f} ms of "
        f"{before[1] * 1e3:.2f} before, {after[0] * 1e3:.2f} ms of {after[1] * 1e3:.2f} after"
    )


def joining_saves(joined: fx.Node, collective: fx.Node) -> float:
    """Seconds that ``joined``, a pipeline of products and ``collective``, is forecast to save over them one after the
    other."""
    return links.seconds(collective) - links.pipeline_of(joined).exposed_seconds(node_seconds(joined), ASSUMED)

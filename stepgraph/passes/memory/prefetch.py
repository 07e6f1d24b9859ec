"""Copy the optimizer state of the first parts of an update to the device while backward still runs.

Matches: copies of state to the device that begin before anything is copied back (see `offload_optimizer`): the others
wait for memory that an update frees, and travel at the same time as what is copied back. Before -> after:

    ...; backward(); y = reload_begin(m, device); ...  ->  ...; y = reload_begin(m, device); backward(); ...

A copy begins as late as the cost model says that it takes, after those of activations, where the graph has room for it:
the peak stays as it is. Under a compiler it begins between two repeated blocks, so that no kernel is split. Exact: a
copy has the same bits. Preconditions: all passes that move nodes or free memory have run; backward and update are in
one graph.
"""

import bisect
import itertools
from dataclasses import dataclass

import numpy as np
from torch import fx

from stepgraph.costs.hardware import host_copy_seconds
from stepgraph.costs.memory import lifetimes
from stepgraph.costs.timeline import assumed_timeline
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import RELOAD_BEGIN, STORE_BEGIN, device_bytes
from stepgraph.graph.provenance import provenance, set_provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.options import StepOptions
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.memory.offload import Trips
from stepgraph.passes.memory.recompute import Plan


@dataclass(frozen=True)
class PrefetchOptions:
    """``compiled``: whether a compiler joins nodes."""

    compiled: bool = False


def _from_options(options: StepOptions) -> dict[str, object] | None:
    return {"compiled": options.compiles_all} if options.may_offload_optimizer else None


@register(
    "prefetch_state",
    "exact",
    options=PrefetchOptions(),
    after=("offload_optimizer", "fit_memory", "overlap", "copy_engines"),
    from_options=_from_options,
)
def prefetch_state(step: StepGraph, options: PrefetchOptions, report: PassReport) -> None:
    """Begin the first copies of optimizer state to the device during backward."""
    state = [node for node in step.graph.find_nodes(op="call_function", target=RELOAD_BEGIN) if _is_state(node)]
    if not state or not any(step.nodes("backward")):
        report.skipped = "the update is a graph of its own" if state else "no optimizer state is on the host"
        return
    before = _exposed_seconds(step, state)
    plan = Plan(step)
    trips = Trips(plan, options.compiled)
    position = plan.aliases.position
    stored = next(iter(step.graph.find_nodes(op="call_function", target=STORE_BEGIN)), None)
    first = [node for node in state if stored is None or position[node] < position[stored]]
    others = [position[n] for n in step.graph.find_nodes(op="call_function", target=RELOAD_BEGIN) if not _is_state(n)]
    alive = _alive(step, trips, position)
    at = max(trips.earliest, max(others, default=-1) + 1)
    until = trips.done[min(position[user] for node in first for user in node.users)]
    left = list(itertools.accumulate(host_copy_seconds(tensor_bytes(node)) for node in reversed(first)))[::-1]
    most, moved = int(alive.max()), []
    for node, seconds in zip(first, left, strict=True):
        here, size = position[node], device_bytes(node)
        full = np.flatnonzero(alive[at:here] + size > most)
        at += int(full[-1]) + 1 if full.size else 0
        latest = bisect.bisect_right(trips.done, until - seconds) - 1
        room = trips.begins[bisect.bisect_left(trips.begins, at) : bisect.bisect_left(trips.begins, here)]
        if not room:
            break
        at = room[max(bisect.bisect_right(room, latest) - 1, 0)]
        alive[at:here] += size
        plan.nodes[at].prepend(node)
        set_provenance(node, provenance(node)._replace(phase="backward"))
        moved.append(node)
    report.matched, report.changed = len(state), len(moved)
    after = _exposed_seconds(step, state)
    report.added_s = after - before
    report.summary = (
        f"{len(moved)} of the first {len(first)} copies of optimizer state to the device "
        f"({sum(map(tensor_bytes, moved)) / 2**20:.1f} MiB) begin in backward; the step waits {after * 1e3:.2f} ms for "
        f"copies of state, {before * 1e3:.2f} without"
    )


def _is_state(node: fx.Node) -> bool:
    return node.args[0].op == "placeholder"


def _alive(step: StepGraph, trips: Trips, position: dict[fx.Node, int]) -> np.ndarray:
    """Bytes in memory while each node runs."""
    graph = step.graph
    change = np.zeros(len(position) + 1, dtype=np.int64)
    change[0] = sum(device_bytes(n) for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    for node, made, freed in lifetimes(graph, trips.plan.aliases, trips.fusion):
        change[position[node]] += device_bytes(node) * made
        for root in freed:
            change[position[node] + 1] -= device_bytes(root)
    return np.cumsum(change)[:-1]


def _exposed_seconds(step: StepGraph, state: list[fx.Node]) -> float:
    """Seconds that the step waits for copies of optimizer state, in both directions."""
    names = {node.name for node in (*state, *step.graph.find_nodes(op="call_function", target=STORE_BEGIN))}
    return sum(copy.exposed_seconds for copy in assumed_timeline(step.graph).copies if copy.node in names)

"""Copy the optimizer state of the first parts of an update to the device while backward still runs.

Matches: copies of state to the device that begin before anything is copied back (see `offload_optimizer`): the others
wait for memory that an update frees, and travel at the same time as what is copied back. Before -> after:

    ...; backward(); y = reload_begin(m, device); ...  ->  ...; y = reload_begin(m, device); backward(); ...

A copy begins as late as the cost model says that it takes, after those of activations, where the graph has room for it:
the peak stays as it is. Under a compiler it begins between two repeated blocks, so that no kernel is split. Exact: a
copy has the same bits. Preconditions: all passes that move nodes or free memory have run.

With accumulation the last microbatch and the update are one graph (`StepProgram.with_last_joined`). In a pipeline, the
update is a graph of its own: the copies become ``step.once[Kind.PREFETCH]``, which a call before it runs.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.attention import transient_bytes
from stepgraph.costs.hardware import ASSUMED, host_copy_seconds
from stepgraph.costs.memory import call_bytes, lifetimes
from stepgraph.costs.roofline import Fusion
from stepgraph.costs.timeline import assumed_seconds, assumed_timeline, simulate
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import replace
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.host_copies import RELOAD_BEGIN, STORE_BEGIN, device_bytes
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance, set_provenance
from stepgraph.graph.stages import extract, new_input
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.graph.values import Value
from stepgraph.options import StepOptions
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.memory.offload import Trips
from stepgraph.passes.memory.recompute import Plan


@dataclass(frozen=True)
class PrefetchOptions:
    """``compiled``: whether a compiler joins nodes. ``calls``: of the calls before an update that is a graph of its
    own, see `before_update`."""

    compiled: bool = False
    calls: tuple[tuple[float, int], ...] = ()


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
    if not state or not (options.calls or any(step.nodes("backward"))):
        report.skipped = "the update is a graph of its own" if state else "no optimizer state is on the host"
        return
    report.matched = len(state)
    if options.calls:
        _in_a_call(step, _first(step, state), options, report)
        return
    computing = assumed_seconds(step.graph)
    before = _exposed_seconds(step, state, computing)
    plan = Plan(step)
    trips = Trips(plan, options.compiled)
    position = plan.aliases.position
    first = _first(step, state)
    others = [position[n] for n in step.graph.find_nodes(op="call_function", target=RELOAD_BEGIN) if not _is_state(n)]
    alive, _ = _alive(step, plan.aliases, trips.fusion)
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
    report.changed = len(moved)
    after = _exposed_seconds(step, state, computing)
    report.added_s = after - before
    report.summary = (
        f"{len(moved)} of the first {len(first)} copies of optimizer state to the device "
        f"({sum(map(tensor_bytes, moved)) / 2**20:.1f} MiB) begin in backward; the step waits {after * 1e3:.2f} ms for "
        f"copies of state, {before * 1e3:.2f} without"
    )


def before_update(program: StepProgram, compiled: bool) -> tuple[tuple[float, int], ...]:
    """For each call of a pipeline's ``program``, whose last is the update: (seconds from its begin to the update's,
    bytes that stay free from there until the update, or in it, if the step's peak is not to rise)."""
    needs = call_bytes(program, fused=compiled)
    seconds = {
        name: assumed_timeline(program.graphs[name].graph, compiled).step_seconds
        for name, call in program.calls().items()
        if call.computes
    }
    left, room, found = 0.0, max(needs), [(0.0, max(needs) - needs[-1])]
    for call, need in zip(program.schedule[-2::-1], needs[-2::-1], strict=True):
        left, room = left + seconds.get(call.graph, 0.0), min(room, max(needs) - need)
        found.append((left, room))
    return tuple(found[::-1])


def with_prefetch(program: StepProgram, calls: Sequence[tuple[float, int]]) -> StepProgram:
    """``program`` with the call that `prefetch_state` made of its update, if any. ``calls``: as of `before_update`."""
    graph = program.graphs[Kind.UPDATE].once.get(Kind.PREFETCH)
    if graph is None:
        return program
    place = _place(calls, graph.graph.find_nodes(op="call_function", target=RELOAD_BEGIN))
    schedule = [*program.schedule[:place], Call(Kind.PREFETCH), *program.schedule[place:]]
    return StepProgram(program.graphs | {Call(Kind.PREFETCH).graph: graph}, schedule, program.log)


def _place(calls: Sequence[tuple[float, int]], copies: Sequence[fx.Node]) -> int | None:
    """The last call before which ``copies`` begin early enough, else the first with room for them; None without any."""
    size, seconds = sum(map(device_bytes, copies)), _seconds(copies)
    open_ = [place for place, (_, room) in enumerate(calls[:-1]) if size <= room]
    return max((place for place in open_ if calls[place][0] >= seconds), default=min(open_, default=None))


def _in_a_call(step: StepGraph, first: list[fx.Node], options: PrefetchOptions, report: PassReport) -> None:
    """Move as many of the ``first`` copies to a graph of their own as have room and come earlier by it."""
    first = [node for node in first if len(node.args[0].users) > 1]  # what is stored, too, is known to be on the host
    aliases, calls = Aliases(step.graph), options.calls
    alive, freed = _alive(step, aliases, Fusion(step.graph, aliases, True) if options.compiled else None)
    most, count, own = 0.0, 0, alive.max() + calls[-1][1]
    for n, node in enumerate(first, 1):
        alive[: aliases.position[node]] += device_bytes(node)  # an input is there for the whole call
        alive[freed[node] + 1 :] += device_bytes(node)
        place = _place(calls, first[:n]) if alive.max() <= own else None
        hidden = 0.0 if place is None else min(calls[place][0], _seconds(first[:n]))
        most, count = max((most, count), (hidden, n), key=lambda found: found[0])
    moved = first[:count]
    if not moved:
        report.skipped = "no call before the update leaves room for a copy"
        return
    given = [(Value(node.name), node) for node in moved]
    step.once = step.once | {Kind.PREFETCH: extract(step, moved, given, lambda node: Value(node.name))}
    for what, node in given:
        replace(node, new_input(step, what, node, node.meta["val"]))
    report.changed, report.added_s = count, -most
    report.summary = (
        f"{count} of the first {len(first)} copies of optimizer state to the device "
        f"({sum(map(tensor_bytes, moved)) / 2**20:.1f} MiB) begin before the last calls; "
        f"the step waits {most * 1e3:.2f} ms less for them"
    )


def _first(step: StepGraph, state: list[fx.Node]) -> list[fx.Node]:
    """The copies that begin before anything is copied back."""
    stored = next(iter(step.graph.find_nodes(op="call_function", target=STORE_BEGIN)), None)
    return [node for node in state if stored is None or node < stored]


def _seconds(copies: Iterable[fx.Node]) -> float:
    return sum(host_copy_seconds(tensor_bytes(node)) for node in copies)


def _is_state(node: fx.Node) -> bool:
    return node.args[0].op == "placeholder"


def _alive(step: StepGraph, aliases: Aliases, fusion: Fusion | None) -> tuple[np.ndarray, dict[fx.Node, int]]:
    """(bytes in memory while each node runs, the place of the node after which each memory is free)."""
    graph, position = step.graph, aliases.position
    change, free = np.zeros(len(position) + 1, dtype=np.int64), {}
    change[0] = sum(device_bytes(n) for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    for node, made, freed in lifetimes(graph, aliases, fusion):
        transient = transient_bytes(node)
        change[position[node]] += device_bytes(node) * made + transient
        change[position[node] + 1] -= transient
        for root in freed:
            free[root] = position[node]
            change[position[node] + 1] -= device_bytes(root)
    return np.cumsum(change)[:-1], free


def _exposed_seconds(step: StepGraph, state: list[fx.Node], seconds: dict[fx.Node, float]) -> float:
    """Seconds that the step waits for copies of optimizer state, in both directions. ``seconds``: of every node."""
    names = {node.name for node in (*state, *step.graph.find_nodes(op="call_function", target=STORE_BEGIN))}
    copies = simulate(step.graph, seconds, ASSUMED, links.groups_of(step.graph.nodes)).copies
    return sum(copy.exposed_seconds for copy in copies if copy.node in names)

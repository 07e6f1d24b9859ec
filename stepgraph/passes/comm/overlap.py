"""Decides when collectives start and when compute waits for them; only the graph's order changes.

Matches: gathers of parameters and reductions of gradients. Before -> after:
    wait k, compute k, gather k + 1, wait k + 1 -> wait k, gather k + 1, compute k, wait k + 1
    reduce k, wait k, compute k + 1, reduce k + 1 -> reduce k, compute k + 1, reduce k + 1, wait k
for regions k. A distance of d regions holds the parameters of d regions more, and the unreduced gradients of d: a
collective holds what it reads until it is waited for, so waiting for all of them at the end would hold every gradient
whole. Tier exact: every node keeps its operator and its inputs. Best after `bucket_collectives`.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import WAIT, Collective, by_region
from stepgraph.graph.facts import is_pure, is_view, upstream
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten


@dataclass(frozen=True)
class OverlapOptions:
    """``prefetch``: regions ahead that parameters are gathered. ``delay``: regions that gradients are waited for
    later. 0: not at all."""

    prefetch: int = 1
    delay: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"overlap {name}={value} is negative; give 0 (off), 1 or more regions")


@register(
    "overlap",
    "exact",
    options=OverlapOptions(),
    after=("bucket_collectives", "bucket_all_reduces"),
    needs_process_group=True,
    communicates=True,
)
def overlap(step: StepGraph, options: OverlapOptions, report: PassReport) -> None:
    """Start gathers some regions early and wait for reductions some regions late."""
    peak = estimate_memory(step.graph).peak
    gathers, reductions = collectives.gathers(step), collectives.reductions(step)
    report.matched = len(gathers) + len(reductions)
    if not report.matched:
        return
    moved = list(step.graph.nodes)
    if options.prefetch:
        _prefetch(step, gathers, options.prefetch)
    if options.delay:
        sink(step, reductions, options.delay)
    report.changed = sum(a is not b for a, b in zip(moved, step.graph.nodes, strict=True))
    report.summary = (
        f"prefetches {len(gathers)} gathers by {_regions(options.prefetch)}, delays {len(reductions)} waits for "
        f"reductions by {_regions(options.delay)}"
    )
    after = estimate_memory(step.graph).peak
    report.notes.append(f"peak memory about {peak / 2**20:.1f} MiB before, {after / 2**20:.1f} after")


def _regions(count: int) -> str:
    return f"{count} region{'s' * (count != 1)}"


def _prefetch(step: StepGraph, gathers: list[Collective], distance: int) -> None:
    """Start each region's gathers right after the wait for the gathers of the region ``distance`` before."""
    first = {half: node for node, half in reversed(collectives.halves(step.graph).items())}
    by_half: dict[str, list[list[Collective]]] = defaultdict(list)
    for region in by_region(gathers):
        by_half[region[0].half].append(region)
        for c in region:
            _wait_late(c.wait)
    for half, regions in by_half.items():
        places = [min(c.wait for c in region) for region in regions]
        start = first[half].prev
        for k, region in enumerate(regions):
            place = places[k - distance] if k >= distance else start
            for c in region:
                for node in [*sorted(n for n in upstream(c.node) if n.op == "call_function"), c.node]:
                    if node > place:
                        place.append(node)
                        place = node
            if k < distance:
                start = place


def _wait_late(wait: fx.Node) -> None:
    """Move the wait, and the views and copies that take its result apart, before the first node that reads any."""
    chain, members, readers = [wait], {wait}, []
    for node in chain:  # grows
        for user in node.users:
            if user not in members:
                apart = is_pure(user) and (is_view(user) or user.target is aten.clone.default)
                (chain if apart and members.issuperset(user.all_input_nodes) else readers).append(user)
                if chain[-1] is user:
                    members.add(user)
    if readers:
        first = min(readers)
        for node in sorted(chain):
            if node < first:
                first.prepend(node)


def sink(step: StepGraph, reductions: list[Collective], distance: int) -> None:
    """Move what finishes gradients after the last reduction of each region.

    With a ``distance``, waits run that many regions later, not beyond the end of backward, and so does what follows
    from them: an all-reduce of what a reduce-scatter gave waits twice.
    """
    tail = collectives.tail(step)
    regions = [region for r in by_region(reductions) if (region := [c for c in r if c.node.args[0] not in tail])]
    if not regions:  # of a stage's forward, or where all that is reduced was reduced before
        return
    # Where the tail may run: after each region's last reduction, and at the end of backward.
    regions.sort(key=lambda region: max(c.node for c in region))
    places = [max(c.node for c in region) for region in regions]
    place_of = {c.node: i for i, region in enumerate(regions) for c in region}
    *_, end = (node for node in step.nodes("backward") if node not in tail or node in place_of)
    if end not in places[-1:]:
        places.append(end)
    aliases = Aliases(step.graph)
    due: dict[fx.Node, tuple[int, int]] = {}  # (place, waits before)
    touched: dict[fx.Node, tuple[int, int]] = {}
    for node in [n for n in step.graph.nodes if n in tail]:
        if node in place_of:
            due[node] = (place_of[node], 0)
            continue
        before = [due[n] for n in node.all_input_nodes if n in due]
        if not before:  # of a collective that stays where it is
            continue
        place, waits = max(before)
        if node.target is WAIT:
            place, waits = min(place + distance, len(places) - 1), waits + 1
        roots = {aliases.root(n) for n in (node, *node.all_input_nodes)}
        # What is written stays in order with all that touches it.
        due[node] = max([(place, waits), *(touched[r] for r in roots if r in touched and aliases.writes.get(r))])
        touched |= dict.fromkeys(roots, due[node])
    for node in sorted((n for n in due if n not in place_of), key=due.__getitem__):
        place = due[node][0]
        places[place].append(node)
        places[place] = node

"""One collective for all parameters, or all gradients, of a region; and when collectives start and are waited for.

`bucket_collectives`, `bucket_all_reduces`. Matches: gathers of parameters, and reductions of gradients, that agree in
region, dtype, operation and process group. Before -> after:
    wait(all_gather(x)), ... -> wait(all_gather(cat(x, ...))) as (ranks, elements); a copy for each parameter
    wait(reduce_scatter(g)), ... -> cat((ranks, elements) of g, ...), wait(reduce_scatter(it)); a view for each gradient
    wait(all_reduce(g)), ... -> cat(g, ...), wait(all_reduce(it)); a view for each gradient
A gather's bucket lies rank after rank, so each parameter's rows are put together by one copy.
Tiers: gathers copy, and a reduce-scatter adds each rank's part in one order, so their buckets are exact; so is an
all-reduce of two ranks. With more ranks the order in which an all-reduce adds depends on the element's place in the
buffer: those are `bucket_all_reduces`, of the tier numerics.
Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023 (FlatParameter).

`overlap`. Only the graph's order changes. Matches: gathers of parameters and reductions of gradients. Before -> after:
    wait k, compute k, gather k + 1, wait k + 1 -> wait k, gather k + 1, compute k, wait k + 1
    reduce k, wait k, compute k + 1, reduce k + 1 -> reduce k, compute k + 1, reduce k + 1, wait k
for regions k. A distance of d regions holds the parameters of d regions more, and the unreduced gradients of d: a
collective holds what it reads until it is waited for, so waiting for all of them at the end would hold every gradient
whole. Norms of gradients that are there before the last wait are computed before it. Tier exact: every node keeps its
operator and its inputs. Best after `bucket_collectives`.
"""

import operator
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, Collective, by_region, group_size
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_pure, is_view, upstream
from stepgraph.graph.provenance import role_of, set_role
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
_NORMS = (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default)


@register(
    "overlap",
    "exact",
    after=("bucket_collectives", "bucket_all_reduces"),
    needs_process_group=True,
    communicates=True,
)
def overlap(step: StepGraph, options: object, report: PassReport) -> None:
    """Start gathers one region early and wait for reductions one region late."""
    peak = estimate_memory(step.graph).peak
    gathers, reductions = collectives.gathers(step), collectives.reductions(step)
    report.matched = len(gathers) + len(reductions)
    if not report.matched:
        return
    moved = list(step.graph.nodes)
    _prefetch(step, gathers)
    sink(step, reductions, distance=1)
    early = _norms_early(step, reductions)
    report.changed = sum(a is not b for a, b in zip(moved, step.graph.nodes, strict=True))
    report.summary = (
        f"prefetches {len(gathers)} gathers by 1 region, delays {len(reductions)} waits for reductions by 1 region"
    )
    if early:
        report.notes.append(f"{early} norms of gradients during the last reduction")
    after = estimate_memory(step.graph).peak
    report.notes.append(f"peak memory about {peak / 2**20:.1f} MiB before, {after / 2**20:.1f} after")


def _prefetch(step: StepGraph, gathers: list[Collective]) -> None:
    """Start each region's gathers right after the wait for the gathers of the region before."""
    first = {half: node for node, half in reversed(collectives.halves(step.graph).items())}
    by_half: dict[str, list[list[Collective]]] = defaultdict(list)
    for region in by_region(gathers):
        by_half[region[0].half].append(region)
        for c in region:
            _wait_late(c.wait)
    for half, regions in by_half.items():
        places = [first[half].prev, *(min(c.wait for c in region) for region in regions)]
        for region, place in zip(regions, places, strict=False):
            for c in region:
                for node in [*sorted(n for n in upstream(c.node) if n.op == "call_function"), c.node]:
                    if node > place:
                        place.append(node)
                        place = node


def _norms_early(step: StepGraph, reductions: list[Collective]) -> int:
    """Move norms of gradients that are there before the last wait for a reduction, and not written after it, before it.
    How many."""
    last, aliases = max((c.wait for c in reductions), default=None), Aliases(step.graph)
    norms = [n for n in step.nodes("optimizer") if last and n.target in _NORMS and max(n.all_input_nodes) < last < n]
    at = aliases.position
    early = [n for n in norms if not any(aliases.written_between(x, at[last], at[n]) for x in n.all_input_nodes)]
    for node in early:
        last.prepend(node)
    return len(early)


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
    from them: an all-reduce of a reduce-scatter's result waits twice.
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


@register(
    "bucket_collectives",
    "exact",
    after=("dedupe_unshards", "reshard_after_forward"),
    needs_process_group=True,
    communicates=True,
)
def bucket_collectives(step: StepGraph, options: object, report: PassReport) -> None:
    """One flat all-gather, reduce-scatter or all-reduce for each region of the model."""
    found = _bucket(step, report, lambda c: not _reorders_sums(c))
    left = [c for c in found if _reorders_sums(c)]
    if left:
        ranks = max(group_size(c.node) for c in left)
        report.notes.append(
            f"{len(left)} all-reduces over {ranks} ranks left unchanged: a bucket may add in another order"
        )
    if found and not step.blocks:
        report.notes.append("the model declares no repeated blocks (nn.ModuleList): treated as one region")


@register("bucket_all_reduces", "numerics", needs_process_group=True, communicates=True)
def bucket_all_reduces(step: StepGraph, options: object, report: PassReport) -> None:
    """One flat all-reduce for each region of the model where more than two ranks share a sum."""
    _bucket(step, report, _reorders_sums)


def _reorders_sums(c: Collective) -> bool:
    """Whether a bucket may add the ranks' values in another order: a ring starts each part of a buffer elsewhere."""
    return c.node.target is ALL_REDUCE and group_size(c.node) > 2


def _bucket(step: StepGraph, report: PassReport, wanted: Callable[[Collective], bool]) -> list[Collective]:
    """Bucket the ``wanted`` collectives; all that were found."""
    reductions, gathers = collectives.reductions(step), collectives.gathers(step)
    report.matched = sum(map(wanted, [*gathers, *reductions]))
    if not report.matched:
        return [*gathers, *reductions]
    counts: dict[str, list[int]] = defaultdict(list)
    # Gradients are finished after the last reduction of their region, where the bucket will be.
    sink(step, reductions, distance=0)
    rounds = _rounds(step)
    for found in (gathers, reductions):
        for members in _buckets([c for c in found if wanted(c)], rounds):
            _BUILD[members[0].node.target](step, members)
            counts[members[0].node.target.name()].append(sum(c.wait.meta["val"].nbytes for c in members))
            report.changed += len(members)
            for c in members:
                erase_unread(c.wait, collectives=True)
    report.summary = f"{report.changed} of {report.matched} collectives in {sum(map(len, counts.values()))} buckets"
    for name, sizes in counts.items():
        report.notes.append(
            f"{name.partition('::')[2]}: {len(sizes)} buckets, {sum(sizes) / 2**20:.1f} MiB of results, "
            f"the largest {max(sizes) / 2**20:.1f}"
        )
    return [*gathers, *reductions]


def _rounds(step: StepGraph) -> dict[fx.Node, int]:
    """For what finishes gradients, how many reductions it comes after: with ``ddp=2,tp=2`` the gradient of a norm is
    summed over tp, then averaged over ddp, where that of a matrix is averaged at once."""
    rounds: dict[fx.Node, int] = {}
    tail = collectives.tail(step)
    for node in (n for n in step.graph.nodes if n in tail):
        rounds[node] = max((rounds.get(n, 0) for n in node.all_input_nodes), default=0) + (node.target is WAIT)
    return rounds


def _buckets(found: list[Collective], rounds: dict[fx.Node, int]) -> list[list[Collective]]:
    """Collectives that become one; none of them waits for the result of another, or of one in another round."""
    buckets = []
    for region in by_region(found):
        forms: dict[tuple, list[Collective]] = defaultdict(list)
        for c in region:
            forms[rounds.get(c.node, 0), *c.form].append(c)
        buckets += [members for members in forms.values() if len(members) > 1]
    return buckets


def _gather(step: StepGraph, members: list[Collective]) -> None:
    graph, build = step.graph, Builder(*(c.node for c in members))
    first = members[0].node
    # What the others gather is made only from parameters, and is made before the bucket.
    for c in members[1:]:
        for node in sorted(upstream(c.node)):
            if node.op == "call_function" and node > first:
                first.prepend(node)
    shards = [c.node.args[0] for c in members]
    ranks = first.args[1]
    with graph.inserting_before(first):
        flat = build(aten.cat.default, [_flat(build, x, [-1]) for x in shards])
        gathered = build(ALL_GATHER, flat, *first.args[1:])
    with graph.inserting_after(gathered):
        waited = build(WAIT, gathered)
    with graph.inserting_before(waited.next):
        rows = build(aten.view.default, waited, [ranks, -1])
        parts = build(aten.split_with_sizes.default, rows, [x.meta["val"].numel() for x in shards], 1)
        for i, c in enumerate(members):
            part = build(operator.getitem, parts, i, like=c.wait)
            whole = build.copy(part, like=c.wait)
            c.wait.replace_all_uses_with(build(aten.view.default, whole, list(c.wait.meta["val"].shape), like=c.wait))


def _reduce(step: StepGraph, members: list[Collective]) -> None:
    graph, build = step.graph, Builder(*(c.node for c in members))
    last = max(c.node for c in members)
    scatters = last.target is REDUCE_SCATTER
    inputs = [c.node.args[0] for c in members]
    with graph.inserting_before(last):
        flat = _bucket_of(inputs)
        if flat is None:
            shape = [last.args[2], -1] if scatters else [-1]
            flat = build(aten.cat.default, [_flat(build, x, shape) for x in inputs], len(shape) - 1)
            flat = build(aten.view.default, flat, [-1]) if scatters else flat
        _unfinished(flat, inputs)
        waited = build(WAIT, build(last.target, flat, *last.args[1:]))
        results = [c.wait.meta["val"] for c in members]
        parts = build(aten.split_with_sizes.default, waited, [r.numel() for r in results])
        for i, (c, r) in enumerate(zip(members, results, strict=True)):
            part = build(operator.getitem, parts, i, like=c.wait)
            c.wait.replace_all_uses_with(build(aten.view.default, part, list(r.shape), like=c.wait))


def _unfinished(flat: fx.Node, inputs: list[fx.Node]) -> None:
    """What puts gradients together before their first reduction does not finish them: it has no role."""
    if any(role_of(node) is None for node in inputs):
        made = [flat]
        for node in made:  # grows
            set_role(node, None)
            made += [n for n in node.all_input_nodes if n not in inputs]


def _bucket_of(inputs: list[fx.Node]) -> fx.Node | None:
    """The bucket that ``inputs`` are all the parts of, in order: what a reduce-scatter gave is all-reduced as it is."""
    parts = [x.args[0] for x in inputs if x.target is aten.view.default]
    splits = {part.args[0] for part in parts if part.target is operator.getitem}
    split = splits.pop() if len(splits) == 1 else None
    if split is None or split.target is not aten.split_with_sizes.default or split.args[0].target is not WAIT:
        return None
    whole = [part.args[1] for part in parts] == list(range(len(split.args[1]))) and len(parts) == len(inputs)
    return split.args[0] if whole and split.args[0].meta["val"].ndim == 1 else None


def _flat(build: Builder, x: fx.Node, shape: list[int]) -> fx.Node:
    """``x`` as ``shape``; a collective reads it as contiguous."""
    return build(aten.view.default, build.contiguous(x), shape)


_BUILD = {ALL_GATHER: _gather, REDUCE_SCATTER: _reduce, ALL_REDUCE: _reduce}

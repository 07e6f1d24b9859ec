"""Gathers of parameters and reductions of gradients by the copy engines of GPUs, not by kernels of NCCL.

Matches: all-gathers of parameters and reduce-scatters (sums, means) of gradients, buckets or not. Before -> after:
    wait(all_gather(cat(cast(x), ...))), a copy for each parameter -> gather_end(gather_begin([x, ...])): its copies
    wait(reduce_scatter(cat(cast(g), ...))) -> reduce_end(reduce_begin([g, ...])), the sums of them all
An NCCL kernel keeps processors for as long as it runs, and a concurrent matrix product takes up to half as long again.
Casts and copies into a bucket move with the start; gradients that are only widened for the sum are sent unwidened.
Tier numerics: sums are taken in the order of ranks; with two ranks every bit stays. Preconditions: the ranks of a group
share a machine (on GPUs, symmetric memory over NVLink), collectives of one group are waited for in the order in which
they begin, and the step has no all_to_all_single (Muon's exchanges, those of experts by NCCL). Best after `overlap`,
which says when they do.
"""

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from torch import fx

from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import ALL_GATHER, REDUCE_SCATTER, Collective, spans_machines
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import argument, behind_reshapes
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten


@dataclass(frozen=True)
class CopyEnginesOptions:
    """``ranks_per_machine``: neighbours that share a machine; 0: as torchrun started them."""

    ranks_per_machine: int = 0


@register(
    "copy_engines",
    "numerics",
    options=CopyEnginesOptions(),
    after=("bucket_collectives", "bucket_all_reduces", "overlap"),
    needs_process_group=True,
    communicates=True,
    from_options=lambda options: {} if options.copy_engines else None,
    for_target=lambda own, target: replace(own, ranks_per_machine=own.ranks_per_machine or target.ranks_per_machine),
)
def copy_engines(step: StepGraph, options: CopyEnginesOptions, report: PassReport) -> None:
    """Move parameters and gradients during compute without taking multiprocessors from it."""
    found = [c for c in collectives.gathers(step) + collectives.reductions(step) if c.node.target in _REPLACE]
    report.matched = len(found)
    left: Counter[str] = Counter()
    # On two H200s llama3-1b with Muon, whose exchanges are such collectives, hung in its second step.
    has_all_to_all = any(n.target is collectives.ALL_TO_ALL for n in step.graph.nodes)
    hangs = "the step has an NCCL all_to_all_single, and together they may hang" if has_all_to_all else None
    kept: dict[tuple, list[Collective]] = defaultdict(list)
    for c in sorted(found, key=lambda c: c.node):
        group = kept[c.node.target, collectives.group_of(c.node)]
        reason = spans_machines(collectives.group_of(c.node), options.ranks_per_machine) or _unfit(c.node) or hangs
        if not reason and group and c.wait < group[-1].wait:
            reason = "waited for before one that begins earlier"
        if reason:
            left[f"{c.node.target.overloadpacket.__name__}: {reason}"] += 1
        else:
            group.append(c)
    aliases = Aliases(step.graph)
    sources = {c.node: _sources(c, aliases) for members in kept.values() for c in members}
    replaced: list[fx.Node] = []
    moved = 0
    for members in kept.values():
        sizes, dtypes = [], set()
        for c in members:
            travels = [c.node.args[0]] if c.node.target is ALL_GATHER else sources[c.node]
            dtypes |= {str(n.meta["val"].dtype).removeprefix("torch.") for n in travels}
            begun, old = _REPLACE[c.node.target](step, c, sources[c.node])
            if c.node.target is ALL_GATHER and not _written(c, sources[c.node], aliases):
                moved += _behind_a_pipeline(begun)
            sizes.append(collectives.bytes_sent(begun))
            replaced += old
        if sizes:
            name = members[0].node.target.overloadpacket.__name__
            text = f"{name}: {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB received by each rank"
            report.notes.append(f"{text}, of {', '.join(sorted(dtypes))}")
            report.changed += len(sizes)
    for node in replaced:
        erase_unread(node, collectives=True)
    report.summary = f"{report.changed} of {report.matched} gathers and reductions by copy engines"
    if moved:
        report.notes.append(f"{moved} gathers begin later, after the next product that overlaps a collective")
    report.notes += [f"left unchanged, {kind} ({count})" for kind, count in left.items()]


def _unfit(node: fx.Node) -> str | None:
    if collectives.group_size(node) == 1:
        return "of one rank alone"
    other = node.target is REDUCE_SCATTER and node.args[1] not in ("sum", "avg")
    return f"reduces by {node.args[1]}" if other else None


def _sources(c: Collective, aliases: Aliases) -> list[fx.Node]:
    """What the collective's input is put together from, uncast where that changes no bit of the result, and not written
    until the collective ends: a reduction reads it until then."""
    bucket = c.node.args[0]
    gathers, wanted = c.node.target is ALL_GATHER, bucket.meta["val"].dtype
    until = aliases.position[c.wait] + 1
    flat = behind_reshapes(bucket)
    parts = [bucket]
    if flat.target is aten.cat.default:
        # A gather's bucket is the parts one by one; of a reduction it is for each rank a part of each.
        shape = (1, ()) if gathers else (2, (c.node.args[2],))
        values = [part.meta["val"] for part in flat.args[0]]
        in_order = argument(flat, "dim") == shape[0] - 1 and all((v.ndim, v.shape[:-1]) == shape for v in values)
        if in_order and not any(aliases.written_between(p, aliases.position[flat], until) for p in flat.args[0]):
            parts = flat.args[0]
    parts = [behind_reshapes(part) for part in parts]
    before = [_uncast(part, aliases, until) for part in parts]
    dtypes = {part.meta["val"].dtype for part in before}
    # The copy that a gather begins with rounds as a cast does; a sum of narrow values is that of the widened ones.
    narrow = len(dtypes) == 1 and torch.promote_types(wanted, *dtypes) == wanted
    return before if gathers or narrow else parts


def _written(c: Collective, nodes: list[fx.Node], aliases: Aliases) -> bool:
    """Whether any of ``nodes`` is written while the collective is under way."""
    return any(aliases.written_between(n, aliases.position[c.node], aliases.position[c.wait]) for n in nodes)


def _uncast(node: fx.Node, aliases: Aliases, until: int) -> fx.Node:
    """What ``node`` was cast from, if it is read in its own order and nothing writes it up to ``until``."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return node
    source = node.args[0]
    fits = source.meta["val"].is_contiguous() and not aliases.written_between(source, aliases.position[node], until)
    return source if fits else node


def _gather(step: StepGraph, c: Collective, shards: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """(what begins instead of the gather of ``shards``, what is not needed any more)."""
    bucket, ranks, group = c.node.args
    dtype, build = bucket.meta["val"].dtype, Builder(c.node)
    sizes = [shard.meta["val"].numel() for shard in shards]
    old = _copies(c.wait, ranks, sizes)
    if old is None:
        old, sizes = [c.wait], [sum(sizes)]
    with step.graph.inserting_before(c.node):
        begun = build(collectives.GATHER_BEGIN, shards, sizes, dtype, ranks, group)
    with step.graph.inserting_before(c.wait):
        wholes = build(collectives.GATHER_END, begun, sizes, dtype, ranks, group)
        for i, node in enumerate(old):
            whole = build(operator.getitem, wholes, i, like=node)
            node.replace_all_uses_with(build(aten.view.default, whole, list(node.meta["val"].shape), like=node))
    return begun, old


def _behind_a_pipeline(begun: fx.Node) -> bool:
    """Let a gather begin after the first product in a pipeline that follows it: a copy engine takes one copy after
    the other, and the pipeline would wait."""
    (end,) = begun.users
    node = begun.next
    while node is not end and collectives.stage_of(node) != "joined":
        node = node.next
    if node is end:
        return False
    while node.next.target in (operator.getitem, collectives.GATHER_BEGIN):  # gathers keep their order
        node = node.next
    node.append(begun)
    return True


def _copies(wait: fx.Node, ranks: int, sizes: list[int]) -> list[fx.Node] | None:
    """The copies that take a gathered bucket apart into parts of ``sizes``, in order; None if that is not all."""
    node = wait
    for target in (aten.view.default, aten.split_with_sizes.default):
        if [user.target for user in node.users] != [target]:
            return None
        (node,) = node.users
    if node.args[0].meta["val"].shape[0] != ranks or list(node.args[1]) != sizes or argument(node, "dim") != 1:
        return None
    parts = {part.args[1]: list(part.users) for part in node.users}
    copies = [parts[i][0] for i in range(len(sizes)) if len(parts.get(i, ())) == 1]
    dense = all(copy.target is aten.clone.default and copy.meta["val"].is_contiguous() for copy in copies)
    return copies if dense and len(copies) == len(sizes) else None


def _reduce(step: StepGraph, c: Collective, grads: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """(what begins instead of the reduction of ``grads``, what is not needed any more)."""
    _, operation, ranks, group = c.node.args
    build, result = Builder(c.node), c.wait.meta["val"]
    with step.graph.inserting_before(c.node):
        begun = build(collectives.REDUCE_BEGIN, grads, ranks, group)
    with step.graph.inserting_before(c.wait):
        total = build(collectives.REDUCE_END, begun, grads, operation == "avg", result.dtype, ranks, group)
        c.wait.replace_all_uses_with(build(aten.view.default, total, list(result.shape), like=c.wait))
    return begun, [c.wait]


_REPLACE = {ALL_GATHER: _gather, REDUCE_SCATTER: _reduce}

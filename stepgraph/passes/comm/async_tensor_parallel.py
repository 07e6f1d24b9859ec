"""Asynchronous tensor parallelism: matrix products in a pipeline with the collective before or after them.

Matches: gathers of activations whose result, as rows, is multiplied (q, k and v share one gather, so do gate and up;
in backward the gradient of a row-split product); and reduce-scatters of a product, or of a sum of products (in
backward q, k and v again). Before -> after:
    wait(all_gather(x)), mm(rows, w), ... -> all_gather_matmul(x, [w, ...]), and the gathered rows if others read them
    wait(reduce_scatter(mm(a, b) + ...)) -> matmul_reduce_scatter([a, ...], [b, ...])
What DTensor puts around collectives of another dimension than the first (split, cat) goes with them.
Tier numerics: the rows of a product are multiplied chunk by chunk, sums of products stay in one accumulator, and sums
over ranks are taken in the order of ranks and rounded once, where a collective may round on each rank's way.
Preconditions: the ranks of a group share a machine (on GPUs, symmetric memory over NVLink). A pair is left unchanged
where the copies and barriers that a pipeline needs are forecast to take longer than the collective alone.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", 2023; in torch, `torch.ops.symm_mem.fused_all_gather_matmul` and its like.
"""

import math
import operator
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import fx

from stepgraph.costs.timeline import joining_saves
from stepgraph.graph import collectives
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import RESHAPES, is_pure, upstream
from stepgraph.graph.provenance import phase_of, role_of, set_role
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten


@dataclass(frozen=True)
class AsyncTensorParallelOptions:
    """``unprofitable``: also join what the forecast would leave alone. ``ranks_per_machine``: neighbours that share a
    machine; 0: as torchrun started them."""

    unprofitable: bool = False
    ranks_per_machine: int = 0


@register(
    "async_tensor_parallel",
    "numerics",
    options=AsyncTensorParallelOptions(),
    needs_process_group=True,
    communicates=True,
    from_options=lambda options: {} if options.async_tp else None,
    for_target=lambda own, target: replace(own, ranks_per_machine=own.ranks_per_machine or target.ranks_per_machine),
)
def async_tensor_parallel(step: StepGraph, options: AsyncTensorParallelOptions, report: PassReport) -> None:
    """Multiply chunks of the sequence while other chunks are gathered or reduced."""
    joined: dict[str, list[float]] = {}
    left: Counter[str] = Counter()
    aliases = Aliases(step.graph)
    for node in list(step.graph.nodes):
        role = role_of(node)
        if node.target not in _JOIN or not role or role.kind != "activation":
            continue
        report.matched += 1
        apart = collectives.spans_machines(collectives.group_of(node), options.ranks_per_machine)
        reason = apart or _JOIN[node.target](step, node, options, aliases)
        kind = f"{phase_of(node)}, {node.target.overloadpacket.__name__}"
        if isinstance(reason, str):
            left[f"{kind}: {reason}"] += 1
            continue
        new, products = reason
        set_role(new, role)
        report.changed += 1
        joined.setdefault(f"{kind} with {products} product{'s' * (products != 1)}", []).append(
            collectives.bytes_sent(new)
        )
    report.summary = f"{report.changed} of {report.matched} activation collectives overlapped with matrix products"
    for kind, sizes in joined.items():
        report.notes.append(f"{kind}: {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB received by each rank")
    report.notes += [f"left unchanged, {kind} ({count})" for kind, count in left.items()]


def _flat_views(node: fx.Node) -> list[fx.Node]:
    """``node`` and its views as other shapes that keep the last dimension."""
    found = [node]
    for view in found:  # grows
        columns = view.meta["val"].shape[-1]
        found += [user for user in view.users if user.target in RESHAPES and user.meta["val"].shape[-1] == columns]
    return found


def _gathered(wait: fx.Node, ranks: int) -> tuple[fx.Node, int] | None:
    """(the gathered tensor in its true order, the dimension that was gathered); None where it is used otherwise."""
    users = list(wait.users)
    if [user.target for user in users] != [aten.split.Tensor]:
        return wait, 0
    parts = list(users[0].users)
    cats = {user for part in parts for user in part.users}
    cat = cats.pop() if len(cats) == 1 else None
    if cat is None or cat.target is not aten.cat.default or list(cat.args[0]) != parts or len(parts) != ranks:
        return None
    return cat, cat.args[1] if len(cat.args) > 1 else 0


def _join_gather(
    step: StepGraph, node: fx.Node, options: AsyncTensorParallelOptions, aliases: Aliases
) -> tuple[fx.Node, int] | str:
    """(the node that took the place of the gather and its products, their number), or why there is none."""
    (wait,) = node.users
    ranks, group = node.args[1:]
    whole, dim = _gathered(wait, ranks) or (None, 0)
    if whole is None or dim == whole.meta["val"].ndim - 1:
        return "not gathered as rows"
    views = _flat_views(whole)
    readers = {user for view in views for user in view.users if user not in views}
    phases = ("backward",) if phase_of(node) == "backward" else ("forward", "loss")
    products = [r for r in sorted(readers) if _multiplies_rows(r, views) and phase_of(r) in phases]
    place = min(whole.users, default=None)
    movable = {p: needed for p in products if (needed := _before(p.args[1], place, aliases)) is not None}
    products = list(movable)
    if not products:
        return "feeds no product"
    shard = node.args[0]
    shape = shard.meta["val"].shape
    keep = readers != set(products)
    for need in sorted(set().union(*movable.values())):
        place.prepend(need)
    build = Builder(*products)
    with step.graph.inserting_before(place):
        rows = build(
            aten.view.default, build.contiguous(shard), [math.prod(shape[:dim]), math.prod(shape[dim:-1]), shape[-1]]
        )
        weights = [p.args[1] for p in products]
        joined = build(collectives.ALL_GATHER_MATMUL, rows, weights, keep, ranks, group)
        if not options.unprofitable and joining_saves(joined, node) <= 0:
            erase_unread(joined, collectives=True)
            return "too small for a pipeline to pay"
        results = build.parts(joined, *range(keep + len(products)))
        if keep:
            gathered = build(aten.view.default, results[0], list(whole.meta["val"].shape), like=whole)
    for product, result in zip(products, results[keep:], strict=True):
        result.meta |= {"val": product.meta["val"]}
        product.replace_all_uses_with(result)
        step.graph.erase_node(product)
    if keep:
        whole.replace_all_uses_with(gathered)
    for view in reversed(views):
        erase_unread(view, collectives=True)
    return joined, len(products)


def _multiplies_rows(node: fx.Node, views: list[fx.Node]) -> bool:
    return node.target is aten.mm.default and node.args[0] in views and node.args[1] not in views


def _before(weight: fx.Node, place: fx.Node, aliases: Aliases) -> set[fx.Node] | None:
    """The nodes that must move before ``place`` to make ``weight`` available; None if one cannot."""
    needed = {n for n in {*upstream(weight), weight} if n.op == "call_function" and not n < place}
    gathers = (ALL_GATHER, WAIT)
    fits = all(n.target in gathers or (is_pure(n) and not aliases.writes.get(aliases.root(n))) for n in needed)
    return needed if fits and place not in needed else None


def _join_scatter(
    step: StepGraph, node: fx.Node, options: AsyncTensorParallelOptions, aliases: Aliases
) -> tuple[fx.Node, int] | str:
    """(the node that took the place of the products and the reduce-scatter, their number), or why there is none."""
    (wait,) = node.users
    source, operation, ranks, group = node.args
    if operation != "sum":
        return f"reduces by {operation}"
    whole, dim = _scattered(source, ranks)
    shape = whole.meta["val"].shape
    products = _terms(whole, shape[-1]) if dim < len(shape) - 1 else None
    if products is None:
        return "not of products alone"
    build = Builder(*products)
    with step.graph.inserting_before(node):
        sides = ([p.args[i] for p in products] for i in (0, 1))
        joined = build(collectives.MATMUL_REDUCE_SCATTER, *sides, math.prod(shape[:dim]), ranks, group)
        if not options.unprofitable and joining_saves(joined, node) <= 0:
            erase_unread(joined, collectives=True)
            return "too small for a pipeline to pay"
        result = build(aten.view.default, joined, list(wait.meta["val"].shape), like=wait)
    wait.replace_all_uses_with(result)
    erase_unread(wait, collectives=True)
    return joined, len(products)


def _scattered(source: fx.Node, ranks: int) -> tuple[fx.Node, int]:
    """(the tensor whose parts ``source`` lists rank after rank, the dimension that they split)."""
    parts = source.args[0] if source.target is aten.cat.default and len(source.users) == 1 else []
    first = source.args[1] if len(source.args) > 1 else 0
    splits = {part.args[0] for part in parts if part.target is operator.getitem and len(part.users) == 1}
    split = splits.pop() if len(splits) == 1 and first == 0 else None
    in_order = [part.args[-1] for part in parts] == list(range(ranks))
    if split is None or split.target is not aten.split.Tensor or not in_order:
        return source, 0
    return split.args[0], split.args[2] if len(split.args) > 2 else 0


def _terms(node: fx.Node, columns: int) -> list[fx.Node] | None:
    """The products of which ``node`` is the sum, in order; None if it is anything else, or others read a part of it."""
    value = node.meta["val"]
    if len(node.users) != 1 or value.shape[-1] != columns:
        return None
    if node.target is aten.mm.default:
        return [node]
    if node.target in RESHAPES:
        return _terms(node.args[0], columns)
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    if any(a.meta["val"].shape != value.shape or a.meta["val"].dtype != value.dtype for a in node.args):
        return None
    left, right = (_terms(a, columns) for a in node.args)
    return None if left is None or right is None else left + right


_JOIN = {ALL_GATHER: _join_gather, REDUCE_SCATTER: _join_scatter}

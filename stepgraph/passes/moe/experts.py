"""Experts of models that know nothing of stepgraph, as transformers' ``grouped_mm``, on the kernels of `kernels.moe`.

Matches, by operators: ``sort`` of the experts that a ``topk`` chose, and what is made of its permutation, forward and
backward. Before -> after, for K experts a token:

    sort(chosen.view(-1)), histc, cumsum          -> sort_by_expert, cumsum
    x[permutation // K]                           -> gather_rows                  gradient: combine_rows
    (rows * weights)[inverse].view(N, K, D).sum(1) -> combine_rows                 gradient: combine_rows_backward
    _grouped_mm                                   -> grouped_mm, grouped_mm_weight

so that no gradient is added up by ``index_put``, and nothing of N * K rows is written that is read only to be added up.
Each line is independent: where one does not match, what is left reads the permutation of ours.
Tier numerics: rows of an expert may be in another order than by an unstable sort; weighted rows are added up in fp32
without a rounding in between. Preconditions: the experts come from a ``topk`` over as many as are counted, so that each
slot is one's; offsets from ``histc`` and ``cumsum``; grouped products whose results are contiguous.
Source: own kernels, see `stepgraph.kernels.moe`.
"""

import operator

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import argument, only_user
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.moe.combine import backward_of_combined, combined
from stepgraph.passes.moe.routing import INDEXINGS, Routing, counts_experts, is_zeros, routing_of

aten, ours = torch.ops.aten, torch.ops.stepgraph
_SORTS = (aten.sort.default, aten.sort.stable)


@register("fuse_experts", "numerics", after=("index_gradients",))
def fuse_experts(step: StepGraph, options: object, report: PassReport) -> None:
    """Sort, gather, multiply and combine the rows of experts by our kernels."""
    counts = dict.fromkeys(("gathers", "combines", "products"), 0)
    for node in step.graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        report.matched += 1
        counts["products"] += _product(node, report)
    routings = 0
    for sort in [n for target in _SORTS for n in step.graph.find_nodes(op="call_function", target=target)]:
        found = routing_of(sort)
        if isinstance(found, str):
            if counts_experts(sort):
                report.matched += 1
                report.notes.append(f"{sort.name} stays as it is: {found}")
            continue
        report.matched += 1
        routings += 1
        _sort_by_expert(found)
        _rewrite(found, counts, report)
    report.changed = routings + counts["products"]
    if report.matched:
        report.summary = (
            f"{routings} routings, {counts['gathers']} gathers, {counts['combines']} combines, "
            f"{counts['products']} grouped products"
        )


# Grouped products


def _product(node: fx.Node, report: PassReport) -> bool:
    """Replace torch's grouped product by ours; whether that was possible."""
    a, b, offsets = node.args[:3] if len(node.args) > 2 else (*node.args[:2], node.kwargs.get("offs"))
    dims = a.meta["val"].ndim, b.meta["val"].ndim
    problem = None
    if dims not in ((2, 3), (2, 2)) or offsets is None:
        problem = f"a product of {dims[0]} by {dims[1]} dimensions"
    elif argument(node, "bias") is not None or argument(node, "out_dtype") not in (None, a.meta["val"].dtype):
        problem = "a bias or another dtype"
    elif not node.meta["val"].is_contiguous():
        problem = "rows of its result are not contiguous"
    if problem:
        report.notes.append(f"{node.name} stays as it is: {problem}")
        return False
    build = Builder(node, before=node)
    if dims == (2, 3):
        new = build(ours.grouped_mm.default, a, b, offsets)
    else:
        last = argument(a, "dim0") in (-2, 0) and argument(a, "dim1") in (-1, 1) if a.op == "call_function" else False
        transposed = a.target is aten.t.default or (a.target is aten.transpose.int and last)
        rows = a.args[0] if transposed else build(aten.t.default, a)
        new = build(ours.grouped_mm_weight.default, rows, b, offsets)
    replace(node, new)
    erase_unread(a)
    return True


def _sort_by_expert(routing: Routing) -> None:
    """Put our sort next to the old one, whose readers read what ours gives."""
    build = Builder(routing.sort, before=routing.sort)
    made = build(ours.sort_by_expert.default, routing.chosen, routing.experts)
    routing.order, routing.places, routing.counts = (build(operator.getitem, made, i) for i in range(3))
    flat, old, histogram = routing.sort.args[0], routing.permutation, routing.counted.args[0]
    behind = Builder(routing.sort, after=routing.sort)
    wide = behind(aten._to_copy.default, routing.order, dtype=old.meta["val"].dtype)
    ids = behind(aten.index.Tensor, flat, [wide])
    replace(old, wide)
    replace(routing.ids, ids)
    routing.permutation = wide
    build = Builder(routing.counted, before=routing.counted)
    replace(routing.counted, build(aten.cumsum.default, routing.counts, 0, dtype=torch.int32))
    erase_unread(histogram, routing.sort)


# What reads the permutation


def _rewrite(routing: Routing, counts: dict[str, int], report: PassReport) -> None:
    """Rows to experts and back, forward and backward."""
    left = [routing.permutation]
    for tokens in [n for n in routing.permutation.users if n.target is aten.floor_divide.default]:
        if tokens.args[1] == routing.slots:
            counts["gathers"] += sum(_gathered(routing, tokens, node) for node in list(tokens.users))
        left.append(tokens)
    for inverse in [n for n in routing.permutation.users if _is_inverse(n, routing)]:
        readers = list(inverse.users)
        done = sum(combined(routing, inverse, n) or backward_of_combined(routing, inverse, n) for n in readers)
        counts["combines"] += done
        if done < len(readers):
            report.notes.append(f"{inverse.name}: {len(readers) - done} of its readers stay as they are")
        build = Builder(inverse, after=inverse)
        wide = build(aten._to_copy.default, routing.places, dtype=inverse.meta["val"].dtype)
        left += [inverse.args[0], inverse.args[2], build.view(wide, inverse.meta["val"].shape)]
        replace(inverse, left[-1])
    erase_unread(*left)


def _gathered(routing: Routing, tokens: fx.Node, node: fx.Node) -> bool:
    """``x[tokens]``, or its gradient, by our kernels; whether ``node`` is one of them."""
    build, order, places = Builder(node, before=node), routing.order, routing.places
    if node.target is aten.index.Tensor and list(node.args[1]) == [tokens] and _is_matrix(node.args[0], routing.tokens):
        replace(node, build(ours.gather_rows.default, node.args[0], places, order, order.meta["val"].shape[0]))
        return True
    if node.target in INDEXINGS and argument(node, "accumulate") and list(node.args[1]) == [tokens]:
        zeros, _, grad = node.args[:3]
        if is_zeros(zeros) and _is_matrix(node, routing.tokens) and grad.meta["val"].dtype == node.meta["val"].dtype:
            replace(node, build(ours.combine_rows.default, grad, places, None, order))
            erase_unread(zeros)
            return True
    return False


def _is_inverse(node: fx.Node, routing: Routing) -> bool:
    """``empty[permutation] = arange``"""
    if node.target is not aten.index_put_.default or argument(node, "accumulate"):
        return False
    empty, indices, numbers = node.args[:3]
    return (
        empty.target in (aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
        and only_user(empty) is node
        and list(indices) == [routing.permutation]
        and numbers.target is aten.arange.default
        and numbers.args == (routing.permutation.meta["val"].shape[0],)
    )


def _is_matrix(node: fx.Node, rows: int) -> bool:
    value = node.meta["val"]
    return value.ndim == 2 and value.shape[0] == rows and value.is_floating_point()

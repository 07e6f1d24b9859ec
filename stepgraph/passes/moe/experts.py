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

Weighted rows are added up by token; forward, with ``w = weights[permutation].unsqueeze(-1)``:

    (rows * w)[inverse].view(N, K, D).sum(1) [cast]      -> combine_rows(rows, places, weights)

Backward, of ``dy`` (N, D):

    g = index_put(zeros, [inverse], dy of each slot)
    g * w [cast]                                         -> combine_rows_backward, gradient of rows
    index_put(zeros, [permutation], (g * rows).sum(1))   -> combine_rows_backward, gradient of weights

Where rows are weighted otherwise, or the gradient is used for more: combine_rows without weights, and gather_rows.
"""

import torch
from torch import fx

from stepgraph.graph.aliases import is_written
from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import RESHAPES, argument, behind_reshapes, is_zeros, only_user, swapped
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.moe.routing import INDEXINGS, Routing, counts_experts, routing_of

aten, ours = torch.ops.aten, torch.ops.stepgraph
_CAST = aten._to_copy.default


def combined(routing: Routing, inverse: fx.Node, node: fx.Node) -> bool:
    """Replace rows brought back by ``node`` and added up by our operator; whether that is what it does."""
    if node.target is not aten.index.Tensor or list(node.args[1]) != [inverse]:
        return False
    weighted, view = node.args[0], only_user(node)
    total = only_user(view) if view is not None and view.target in RESHAPES else None
    if total is None or total.target is not aten.sum.dim_IntList or weighted.meta["val"].ndim != 2:
        return False
    shape = (routing.tokens, routing.slots, weighted.meta["val"].shape[1])
    dims = [d % 3 for d in argument(total, "dim")]
    if view.meta["val"].shape != shape or dims != [1] or argument(total, "keepdim"):
        return False
    rows, weights = _weighted(weighted, routing) if only_user(weighted) is node else (None, None)
    last = _in_dtype(total, rows) if rows is not None else None
    if last is None:
        rows, weights, last, place = weighted, None, _in_dtype(total, weighted), node
    else:
        place = weighted  # what is read must be as it was there
    if last is None:
        return False
    build = Builder(last, before=place)
    weights = None if weights is None else build.view(weights, shape[:2])
    replace(last, build(ours.combine_rows.default, rows, routing.places, weights, routing.order))
    erase_unread(total if last is not total else view)
    return True


def backward_of_combined(routing: Routing, inverse: fx.Node, node: fx.Node) -> bool:
    """Replace the gradient of rows that were brought back by ours; whether that is what ``node`` is."""
    if node.target not in INDEXINGS or not argument(node, "accumulate") or list(node.args[1]) != [inverse]:
        return False
    zeros, _, spread = node.args[:3]
    dy = _repeated(spread, routing)
    if dy is None or not is_zeros(zeros) or node.meta["val"].ndim != 2:
        return False
    build, inputs = Builder(node, before=node), (zeros, spread)
    found = _gradients(routing, node)
    if found is None:
        grad = build.cast(dy, node.meta["val"].dtype)
        gathered = build(ours.gather_rows.default, grad, routing.places, routing.order, node.meta["val"].shape[0])
        replace(node, gathered)
        erase_unread(*inputs)
        return True
    rows, weights, drows, dweights = found
    grad = build.cast(_before_cast(dy, rows), rows.meta["val"].dtype)
    matrix = build.view(weights, (routing.tokens, routing.slots))
    both = build(ours.combine_rows_backward.default, grad, rows, routing.places, matrix, routing.order)
    of_rows, of_weights = build.parts(both)
    chains = (*drows.all_input_nodes, *dweights.all_input_nodes)
    flat = build.view(of_weights, weights.meta["val"].shape)
    replace(drows, of_rows)
    replace(dweights, flat)
    erase_unread(*chains)
    return True


def _weighted(node: fx.Node, routing: Routing) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """(rows, weights (N * K,) before they were sorted) of a product of the two."""
    if node.target is aten.mul.Tensor:
        for rows, factor in (node.args, node.args[::-1]):
            weights = _sorted_weights(factor, routing)
            if weights is not None and rows.meta["val"].shape == node.meta["val"].shape:
                return rows, weights
    return None, None


def _sorted_weights(node: object, routing: Routing) -> fx.Node | None:
    """The weights (N * K,) of which ``node`` is the sorted column."""
    if not isinstance(node, fx.Node) or node.target is not aten.unsqueeze.default or node.args[1] not in (-1, 1):
        return None
    index = node.args[0]
    if index.target is not aten.index.Tensor or list(index.args[1]) != [routing.permutation]:
        return None
    weights, written = index.args[0], any(map(is_written, (node, index, behind_reshapes(index.args[0]))))
    return weights if weights.meta["val"].ndim == 1 and not written else None


def _in_dtype(total: fx.Node, rows: fx.Node) -> fx.Node | None:
    """The sum in the dtype of ``rows``: itself, or the cast that is the only reader of it."""
    dtype = rows.meta["val"].dtype
    if total.meta["val"].dtype == dtype:
        return total
    cast = only_user(total)
    return cast if cast is not None and cast.target is _CAST and cast.meta["val"].dtype == dtype else None


def _repeated(node: fx.Node, routing: Routing) -> fx.Node | None:
    """``dy`` (N, D), if ``node`` (N * K, D) holds each of its rows K times."""
    if routing.slots == 1:
        return node
    node = behind_reshapes(node, aten.clone.default)
    if node.target is not aten.expand.default or node.args[0].target is not aten.unsqueeze.default:
        return None
    dy, dim = node.args[0].args
    shape = dy.meta["val"].shape
    right = len(shape) == 2 and dim in (1, -2) and shape[0] == routing.tokens
    return dy if right and node.meta["val"].shape == (routing.tokens, routing.slots, shape[1]) else None


def _gradients(routing: Routing, grad: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """(rows, weights (N * K,), gradient of rows, gradient of weights) where ``grad``, of the weighted rows, makes both
    gradients and nothing else."""
    products = {user: [a for a in user.args if a is not grad] for user in grad.users if user.target is aten.mul.Tensor}
    if len(grad.users) != 2 or any(len(others) != 1 for others in products.values()) or len(products) != 2:
        return None
    (to_rows, column), (to_weights, rows) = sorted(
        ((user, others[0]) for user, others in products.items()),
        key=lambda pair: _sorted_weights(pair[1], routing) is None,
    )
    weights = _sorted_weights(column, routing)
    if weights is None or not isinstance(rows, fx.Node) or rows.meta["val"].shape != grad.meta["val"].shape:
        return None
    dtype = rows.meta["val"].dtype
    drows = to_rows if to_rows.meta["val"].dtype == dtype else only_user(to_rows)
    dweights = _scattered(routing, to_weights)
    if drows is None or drows.meta["val"].dtype != dtype or drows.target not in (aten.mul.Tensor, _CAST):
        return None
    return None if dweights is None else (rows, weights, drows, dweights)


def _scattered(routing: Routing, product: fx.Node) -> fx.Node | None:
    """``index_put(zeros, [permutation], product.sum(1))``, if that alone is made of ``product``."""
    total = only_user(product)
    if total is None or total.target is not aten.sum.dim_IntList or [d % 2 for d in argument(total, "dim")] != [1]:
        return None
    node = _reader(total)
    while node is not None and node.target in (*RESHAPES, aten.squeeze.dim, _CAST):
        node = _reader(node)
    if node is None or node.target not in INDEXINGS or not argument(node, "accumulate"):
        return None
    right = list(node.args[1]) == [routing.permutation] and is_zeros(node.args[0])
    return node if right and node.meta["val"].shape == (routing.tokens * routing.slots,) else None


def _reader(node: fx.Node) -> fx.Node | None:
    """The only reader of ``node``, apart from zeros of its form."""
    readers = [user for user in node.users if not is_zeros(user)]
    return readers[0] if len(readers) == 1 else None


def _before_cast(dy: fx.Node, rows: fx.Node) -> fx.Node:
    """``dy`` as it was before a cast, if it had the dtype of ``rows`` there."""
    if dy.target is _CAST and dy.args[0].meta["val"].dtype == rows.meta["val"].dtype:
        return dy.args[0]
    return dy


@register("fuse_experts", "numerics", after=("index_gradients",))
def fuse_experts(step: StepGraph, options: object, report: PassReport) -> None:
    """Sort, gather, multiply and combine the rows of experts in our kernels."""
    counts = dict.fromkeys(("gathers", "combines", "products"), 0)
    for node in step.calling(aten._grouped_mm.default):
        report.matched += 1
        counts["products"] += _product(node, report)
    routings = 0
    for sort in [n for target in (aten.sort.default, aten.sort.stable) for n in step.calling(target)]:
        found = routing_of(sort)
        if isinstance(found, str):
            if counts_experts(sort):
                report.matched += 1
                report.notes.append(f"{sort.name} is left unchanged: {found}")
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
        report.notes.append(f"{node.name} is left unchanged: {problem}")
        return False
    build = Builder(node, before=node)
    if dims == (2, 3):
        new = build(ours.grouped_mm.default, a, b, offsets)
    else:
        rows = swapped(a) or build(aten.t.default, a)
        new = build(ours.grouped_mm_weight.default, rows, b, offsets)
    replace(node, new)
    erase_unread(a)
    return True


def _sort_by_expert(routing: Routing) -> None:
    """Put our sort next to the old one, whose readers read what ours gives."""
    build = Builder(routing.sort, before=routing.sort)
    made = build(ours.sort_by_expert.default, routing.chosen, routing.experts)
    routing.order, routing.places, routing.counts = build.parts(made)
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


def _rewrite(routing: Routing, counts: dict[str, int], report: PassReport) -> None:
    """Rows to experts and back, forward and backward."""
    left = [routing.permutation]
    for tokens in [n for n in routing.permutation.users if n.target is aten.floor_divide.default]:
        if tokens.args[1] == routing.slots and not is_written(tokens):
            counts["gathers"] += sum(_gathered(routing, tokens, node) for node in list(tokens.users))
        left.append(tokens)
    for inverse in [n for n in routing.permutation.users if _is_inverse(n, routing)]:
        readers = list(inverse.users)
        done = sum(combined(routing, inverse, n) or backward_of_combined(routing, inverse, n) for n in readers)
        counts["combines"] += done
        if done < len(readers):
            report.notes.append(f"{inverse.name}: {len(readers) - done} of its readers are left unchanged")
        build = Builder(inverse, after=inverse)
        wide = build(aten._to_copy.default, routing.places, dtype=inverse.meta["val"].dtype)
        left += [inverse.args[0], inverse.args[2], build.view(wide, inverse.meta["val"].shape)]
        replace(inverse, left[-1])
    erase_unread(*left)


def _gathered(routing: Routing, tokens: fx.Node, node: fx.Node) -> bool:
    """``x[tokens]``, or its gradient, in our kernels; whether ``node`` is one of them."""
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
        and not is_written(node)
        and numbers.target is aten.arange.default
        and numbers.args == (routing.permutation.meta["val"].shape[0],)
    )


def _is_matrix(node: fx.Node, rows: int) -> bool:
    value = node.meta["val"]
    return value.ndim == 2 and value.shape[0] == rows and value.is_floating_point()

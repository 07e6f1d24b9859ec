"""Weighted rows of experts added up by token, and the gradient of that, as our kernels.

Forward, with ``w = weights[permutation].unsqueeze(-1)``:

    (rows * w)[inverse].view(N, K, D).sum(1) [cast]      -> combine_rows(rows, places, weights)

Backward, of ``dy`` (N, D):

    g = index_put(zeros, [inverse], dy of each slot)
    g * w [cast]                                         -> combine_rows_backward, gradient of rows
    index_put(zeros, [permutation], (g * rows).sum(1))   -> combine_rows_backward, gradient of weights

Where rows are weighted otherwise, or the gradient is used for more: combine_rows without weights, and gather_rows.
"""

import operator

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import argument, only_user
from stepgraph.passes.moe.routing import INDEXINGS, VIEWS, Routing, is_zeros

aten, ours = torch.ops.aten, torch.ops.stepgraph
_CAST = aten._to_copy.default


def combined(routing: Routing, inverse: fx.Node, node: fx.Node) -> bool:
    """Replace rows brought back by ``node`` and added up by our operator; whether that is what it does."""
    if node.target is not aten.index.Tensor or list(node.args[1]) != [inverse]:
        return False
    weighted, view = node.args[0], only_user(node)
    total = only_user(view) if view is not None and view.target in VIEWS else None
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
    of_rows, of_weights = build(operator.getitem, both, 0), build(operator.getitem, both, 1)
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
            if weights is not None:
                return rows, weights
    return None, None


def _sorted_weights(node: object, routing: Routing) -> fx.Node | None:
    """The weights (N * K,) of which ``node`` is the sorted column."""
    if not isinstance(node, fx.Node) or node.target is not aten.unsqueeze.default or node.args[1] not in (-1, 1):
        return None
    index = node.args[0]
    if index.target is not aten.index.Tensor or list(index.args[1]) != [routing.permutation]:
        return None
    return index.args[0] if index.args[0].meta["val"].ndim == 1 else None


def _in_dtype(total: fx.Node, rows: fx.Node) -> fx.Node | None:
    """The sum in the dtype of ``rows``: itself, or the cast that alone reads it."""
    dtype = rows.meta["val"].dtype
    if total.meta["val"].dtype == dtype:
        return total
    cast = only_user(total)
    return cast if cast is not None and cast.target is _CAST and cast.meta["val"].dtype == dtype else None


def _repeated(node: fx.Node, routing: Routing) -> fx.Node | None:
    """``dy`` (N, D), if ``node`` (N * K, D) holds each of its rows K times."""
    if routing.slots == 1:
        return node
    while node.target in (*VIEWS, aten.clone.default):
        node = node.args[0]
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
    while node is not None and node.target in (*VIEWS, aten.squeeze.dim, _CAST):
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

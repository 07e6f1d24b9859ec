"""Weights of experts applied before their last product instead of after it.

Matches, on our operators: rows that a grouped product makes of ``h``, brought back weighted, and the gradients of that.

    y = combine_rows(h @ W, w)              ->  y = combine_rows((h * w) @ W)
    drows, dw = combine_rows_backward(dy)   ->  g = gather_rows(dy),  dh' = g @ W^T
    dh = drows @ W^T                        ->  dh = dh' * w
                                                dw = (dh' * h).sum(-1)
    dW = h^T drows                          ->  dW = (h * w)^T g

The two are equal, as a row's weight is a number. Before, backward needs ``h @ W``, the widest rows of the layer, for
the gradient of the weights alone; after, nothing reads them again, and what is new is elementwise in rows that backward
reads anyway, where a compiler fuses it with the activation.
Tier numerics: ``h * w`` is rounded once instead of the products' results. Preconditions: rows that are read by nothing
else; ``h`` no wider than they are, as ``h * w`` is kept too where nothing recomputes it.
Source: own; SonicMoE (Guo et al. 2025) computes the gradient of weights from ``dh'`` likewise.
"""

from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.aliases import is_written
from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import behind_reshapes, getitem_users, swapped
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_FORWARD, _BACKWARD = ours.combine_rows.default, ours.combine_rows_backward.default
_PRODUCT, _WEIGHT_PRODUCT = ours.grouped_mm.default, ours.grouped_mm_weight.default


class _Found(NamedTuple):
    """Nodes of one match: the product, the sums of its rows per token, and the readers of the rows' gradient."""

    product: fx.Node
    sums: list[fx.Node]
    backward: fx.Node
    to_inner: fx.Node
    to_matrix: list[fx.Node]


@register("weight_experts", "numerics", after=("fuse_experts",))
def weight_experts(step: StepGraph, options: object, report: PassReport) -> None:
    """Weight the rows of experts before their last product, so that backward need not read its result."""
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    for node in step.calling(_BACKWARD):
        found = _match(node, position)
        if report.takes(found, node):
            _rewrite(found)
    report.summary = f"{report.changed} of {report.matched} sums of experts weighted before the last product"


def _match(backward: fx.Node, position: dict[fx.Node, int]) -> _Found | str:
    """What to rewrite, or why it cannot be."""
    _, product, places, weights, _ = backward.args
    if product.target is not _PRODUCT:
        return "the rows are not made by a grouped product"
    inner, matrix, offsets = product.args
    if inner.meta["val"].shape[1] > product.meta["val"].shape[1]:
        return "the rows before the last product are wider than the rows after it"
    if is_written(inner):  # where its matrix is frozen, backward did not read it
        return "the rows before the last product are written to"
    source = behind_reshapes(weights)
    if position.get(source, len(position)) > position[product] or position[places] > position[product]:
        return "the weights are computed after the last product"

    def same(given: fx.Node | None) -> bool:
        return given is not None and behind_reshapes(given) is source

    sums = [user for user in product.users if user is not backward]
    if any(n.target is not _FORWARD or n.args[1] is not places or not same(n.args[2]) for n in sums):
        return "something else reads the rows"
    drows = getitem_users(backward).get(0)
    readers = list(drows.users) if drows is not None else []
    to_inner = [n for n in readers if n.target is _PRODUCT and n.args[0] is drows and n.args[2] is offsets]
    to_matrix = [n for n in readers if n.target is _WEIGHT_PRODUCT and n.args[2] is offsets]
    to_matrix = [n for n in to_matrix if set(n.args[:2]) == {drows, inner}]
    if len(to_inner) != 1 or len(to_inner) + len(to_matrix) != len(readers):
        return "something else reads the gradient of the rows"
    other = to_inner[0].args[1]
    if swapped(other) is not matrix and swapped(matrix) is not other:
        return "its gradient goes through another matrix"
    return _Found(product, sums, backward, to_inner[0], to_matrix)


def _rewrite(found: _Found) -> None:
    product, sums, backward, to_inner, to_matrix = found
    inner, matrix, offsets = product.args
    dy, _, places, weights, order = backward.args
    rows = product.meta["val"].shape[0]
    dtype, wide = inner.meta["val"].dtype, torch.promote_types(inner.meta["val"].dtype, torch.float32)

    build = Builder(product, before=product)
    flat = build.view(behind_reshapes(weights), (weights.meta["val"].numel(), 1))
    slots = build.view(places, (places.meta["val"].numel(), 1))
    column = build.cast(build(ours.gather_rows.default, flat, slots, order, rows), wide)
    weighted = build.cast(build(aten.mul.Tensor, build.cast(inner, wide), column), dtype)
    replaced = build(_PRODUCT, weighted, matrix, offsets)
    for node in sums:
        replace(node, Builder(node, before=node)(_FORWARD, replaced, places, None, node.args[3]))

    build = Builder(backward, before=backward)
    grad = build(ours.gather_rows.default, dy, places, order, rows)
    back = swapped(matrix) or build(aten.transpose.int, matrix, -2, -1)
    unweighted = build.cast(build(_PRODUCT, grad, back, offsets, like=to_inner), wide)
    dinner = build.cast(build(aten.mul.Tensor, unweighted, column, like=to_inner), dtype)
    outputs = getitem_users(backward)
    if 1 in outputs:
        products = build(aten.mul.Tensor, unweighted, build.cast(inner, wide))
        sorted_ = build(aten.sum.dim_IntList, products, [1], True)
        summed = build.view(build(_FORWARD, sorted_, slots, None, order), weights.meta["val"].shape)
        replace(outputs[1], build.cast(summed, weights.meta["val"].dtype))
    for node in to_matrix:
        operands = [grad if n is outputs[0] else weighted for n in node.args[:2]]
        replace(node, Builder(node, before=node)(_WEIGHT_PRODUCT, *operands, offsets))
    replace(to_inner, dinner)
    erase_unread(outputs[0], weights)

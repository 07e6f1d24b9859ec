"""Puts casts and fp8 products into the graph."""

import operator

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.provenance import phase_of
from stepgraph.passes.matmul.casts import Cast, Kind, Planned, Recipe

aten, ours = torch.ops.aten, torch.ops.stepgraph

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def format_of(kind: Kind, recipe: Recipe) -> torch.dtype:
    """The format of a matrix. One scale for a whole output gradient must leave room for its range; one for each row
    need not."""
    return E5M2 if kind == "output gradient" and recipe == "tensorwise" else E4M3


def rewrite(products: list[Planned], casts: dict[tuple, Cast], recipe: Recipe) -> None:
    """Replace ``products``, in the order of the graph, by fp8 products of ``casts``."""
    made = {key: _cast(cast, recipe) for key, cast in casts.items()}
    for planned in products:
        node = planned.product.node
        (a, scale_a), (b, scale_b) = (made[key][columns] for key, _, _, columns in planned.sides())
        fast = recipe != "tensorwise" or planned.which == "forward"
        build = Builder(node, before=node)
        new = build(ours.scaled_product.default, a, b, scale_a, scale_b, planned.product.bias, fast)
        read = node.all_input_nodes
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        erase_unread(*read)


def _cast(cast: Cast, recipe: Recipe) -> dict[bool, tuple[fx.Node, fx.Node]]:
    """(the copy, its scale) in rows, and for True transposed; in the name of the products of the first one's phase."""
    first = cast.products[0]
    build = Builder(*(p for p in cast.products if phase_of(p) == phase_of(first)), before=first)
    dtype, copies = format_of(cast.kind, recipe), (cast.rows, cast.columns)
    x = _in_rows(cast, build)
    if recipe == "tensorwise":
        amax = build(aten.linalg_vector_norm.default, x, float("inf"), None, False, dtype=torch.float32)
        result = build(ours.cast_scaled.default, x, amax, dtype, *copies)
        scale = build(operator.getitem, result, 0)
        return {side: (build(operator.getitem, result, 1 + side), scale) for side in (False, True) if copies[side]}
    result = build(ours.cast_scaled_rows.default, x, dtype, *copies)
    return {
        side: (build(operator.getitem, result, 2 * side), build(operator.getitem, result, 2 * side + 1))
        for side in (False, True)
        if copies[side]
    }


def _in_rows(cast: Cast, build: Builder) -> fx.Node:
    """The matrix in its rows."""
    node = cast.side.node
    if not cast.side.across:
        return node
    return node.args[0] if node.target is aten.t.default else build(aten.t.default, node)

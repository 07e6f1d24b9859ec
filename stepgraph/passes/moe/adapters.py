"""Low-rank adapters of expert weights as products of rows, instead of sums with whole weights.

Matches what `peft` makes of ``target_parameters``: W' = W + s L R for every expert, with L (E, M, r) and R (E, r, N),
read by grouped products alone. Before -> after, for rows sorted by expert once, and each product grouped:

    W' = baddbmm(W, L, R, alpha=s)                 -> nothing
    grouped_mm(x, W'^T)                            -> grouped_mm(x, W^T) + grouped_mm(t, (s L)^T)
    grouped_mm(dy, W')                             -> grouped_mm(dy, W) + grouped_mm(dt, s R)
    dW' = grouped_mm_weight(dy, x)                 -> nothing
    dL = s bmm(dW', R^T)                           -> s grouped_mm_weight(dy, t)
    dR = s bmm(L^T, dW')                           -> s grouped_mm_weight(dt, x)

with t = grouped_mm(x, R^T) and dt = grouped_mm(dy, L); and with transposed weights. Nothing of the
size of the experts' weights is written, neither a sum nor a gradient; t is kept for backward, (rows, r).
Tier numerics: sums in another order, and W is not rounded with the adapter in it. Preconditions: grouped products alone
read W'; on a GPU r is a multiple of 8 in bf16, as these need. A gradient dW' that more reads than dL and dR stays.
Source: Hu et al., "LoRA", 2021, section 4; grouped products of adapters are own.
"""

from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import argument, swapped
from stepgraph.kernels.moe import grouped
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCT, _GRADIENT = ours.grouped_mm.default, ours.grouped_mm_weight.default


class _Adapter(NamedTuple):
    """``sum``: W'. ``products``: its readers, each with whether it reads W'^T. ``gradients``: what gives dW', and
    its readers, each with whether it gives dL."""

    sum: fx.Node
    products: list[tuple[fx.Node, bool]]
    gradients: list[tuple[fx.Node, list[tuple[fx.Node, bool]]]]


@register("lora_experts", "numerics", after=("fuse_experts", "weight_experts", "expert_swiglu"))
def lora_experts(step: StepGraph, options: object, report: PassReport) -> None:
    """Multiply rows with low-rank adapters of experts, instead of adding these to the experts' weights."""
    for node in step.calling(aten.baddbmm.default):
        products = _products(node)
        if products == []:
            continue
        found = "other operators read the sum" if products is None else _adapter(node, products)
        if report.takes(found, node):
            _rewrite(found)
    report.summary = f"{report.changed} of {report.matched} expert adapters computed as grouped products"


def _products(total: fx.Node) -> list[tuple[fx.Node, bool]] | None:
    """The grouped products that read ``total``, in order; empty where none does, None where others read it too."""
    readers = [(user, total, False) for user in total.users if swapped(user) is None]
    for view in (user for user in total.users if swapped(user) is not None):
        readers += [(user, view, True) for user in view.users]
    found = [(user, turned) for user, read, turned in readers if user.target is _PRODUCT and user.args[1] is read]
    return found if not found or len(found) == len(readers) else None


def _adapter(total: fx.Node, products: list[tuple[fx.Node, bool]]) -> _Adapter | str:
    """The adapter that ``total`` adds, or why it stays."""
    weight, left, _ = total.args
    if argument(total, "beta") != 1 or not isinstance(argument(total, "alpha"), (int, float)):
        return "its scales are not numbers"
    if weight.meta["val"].shape != total.meta["val"].shape:
        return "the weight is broadcast"
    rank, rows = left.meta["val"].shape[2], products[0][0].args[0].meta["val"]
    if rank >= min(total.meta["val"].shape[1:]):
        return f"rank {rank} is not below the widths of the experts"
    if grouped.on_device(rows) and rank % 8:
        return f"rank {rank} is not a multiple of 8, which grouped products on this GPU need"
    return _Adapter(total, products, _gradients(total, products))


def _gradients(
    total: fx.Node, products: list[tuple[fx.Node, bool]]
) -> list[tuple[fx.Node, list[tuple[fx.Node, bool]]]]:
    """What gives dW' and is read for dL and dR alone."""
    left, right = total.args[1:]
    inputs = {product.args[0] for product, _ in products}
    found = []
    for gradient in total.graph.find_nodes(op="call_function", target=_GRADIENT):
        a, b, _ = gradient.args[:3]
        if not inputs & {a, b} or gradient.meta["val"].shape != total.meta["val"].shape:
            continue
        readers = [(user, _side(user, gradient, left, right)) for user in gradient.users]
        if readers and all(side is not None for _, side in readers):
            found.append((gradient, readers))
    return found


def _side(node: fx.Node, gradient: fx.Node, left: fx.Node, right: fx.Node) -> bool | None:
    """True for bmm(dW', R^T), False for bmm(L^T, dW'), None for others."""
    if node.target is not aten.bmm.default:
        return None
    one, other = node.args

    def is_transpose(node: fx.Node, factor: fx.Node) -> bool:
        return swapped(node) is factor or swapped(factor) is node

    if one is gradient and is_transpose(other, right):
        return True
    return False if other is gradient and is_transpose(one, left) else None


def _rewrite(found: _Adapter) -> None:
    weight, left, right = found.sum.args
    scale, narrow = argument(found.sum, "alpha"), {}
    # Both factors as they are multiplied with, made once, where the sum was.
    build = Builder(found.sum, before=found.sum)
    turn = lambda node: build(aten.transpose.int, node, 1, 2)  # noqa: E731
    scaled = {
        True: turn(left if scale == 1 else build(aten.mul.Tensor, left, scale)),
        False: right if scale == 1 else build(aten.mul.Tensor, right, scale),
    }
    first, whole = {True: turn(right), False: left}, {True: turn(weight), False: weight}

    def down(rows: fx.Node, offsets: fx.Node, turned: bool, at: fx.Node) -> fx.Node:
        """Rows times R^T (``turned``) or L, made once, before ``at``."""
        if (rows, turned) not in narrow:
            narrow[rows, turned] = Builder(at, before=at)(_PRODUCT, rows, first[turned], offsets)
        return narrow[rows, turned]

    def product(node: fx.Node, turned: bool) -> None:
        rows, _, offsets = node.args[:3]
        t = down(rows, offsets, turned, node)
        build = Builder(node, before=node)
        base = build(_PRODUCT, rows, whole[turned], *node.args[2:], **node.kwargs)
        replace(node, build(aten.add.Tensor, base, build(_PRODUCT, t, scaled[turned], offsets)))

    def gradient(node: fx.Node, readers: list[tuple[fx.Node, bool]]) -> None:
        dy, x, offsets = node.args[:3]
        for reader, of_left in readers:
            inner = down(x if of_left else dy, offsets, of_left, node)
            pair = (dy, inner) if of_left else (inner, x)
            replace(reader, Builder(reader, before=reader)(_GRADIENT, *pair, offsets))
        erase_unread(node)

    # In order: what one makes, those after it read.
    todo = [(node, product, turned) for node, turned in found.products]
    todo += [(node, gradient, readers) for node, readers in found.gradients]
    for node, rewrite, rest in sorted(todo, key=lambda one: one[0]):
        rewrite(node, rest)
    erase_unread(*found.sum.users, found.sum, *whole.values(), *scaled.values(), *first.values())

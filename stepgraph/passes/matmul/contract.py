"""Sums of broadcast products as matrix products.

Models that spell out a contraction, such as the chunks of Mamba-2's state-space scan in transformers, multiply two
tensors, each broadcast along dimensions of the other, and sum: a product of matrices, through a tensor of all
dimensions of both. Autograd gives its gradients the same form.
"""

import math
from collections.abc import Iterable

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten
#: How many times as many elements the whole product has as its factors and the sum together, at least.
_GAIN = 4


@register("contract_products", "numerics", after=("lora",))
def contract_products(step: StepGraph, options: object, report: PassReport) -> None:
    """Make matrix products of sums of broadcast products.

    Matches ``sum(mul(x, y), dims)`` of floating-point tensors; before -> after, for x (b, m, 1, k), y (b, 1, n, k):
    ``sum(x * y, -1)`` -> ``bmm(x', y')`` of (b, m, k) and (b, k, n). Sums are taken in another order, and a product
    narrower than fp32 is not rounded before the sum. Not where a factor has every dimension that stays, so that nothing
    is computed twice; where the product is read elsewhere; or where it has less than four times as many elements as its
    factors and the sum.
    """
    saved = 0
    for node in step.calling(aten.sum.dim_IntList):
        product = node.args[0]
        if product.target is not aten.mul.Tensor or not all(isinstance(x, fx.Node) for x in product.args):
            continue
        report.matched += 1
        if len(product.users) > 1 or (sum_ := _contraction(node, product)) is None:
            continue
        replace(node, sum_(Builder(product, node, before=product)))  # a factor may be written after it
        erase_unread(product)
        report.changed += 1
        saved += product.meta["val"].numel()
    report.summary = f"{report.changed} of {report.matched} sums of products became matrix products"
    if saved:
        report.notes.append(f"{saved:,} products are never written out")


class _Contraction:
    """``node``, the sum of a product of ``factors`` over ``summed`` dimensions. ``held``: the dimensions of the product
    that each factor has and is not broadcast along; dimensions of one element are nowhere."""

    def __init__(self, node: fx.Node, factors: tuple[fx.Node, fx.Node], held: list[set[int]], summed: set[int]):
        self.node, self.factors, self.held, self.summed = node, factors, held, summed
        self.sizes = node.args[0].meta["val"].shape
        left, right = held
        self.batch, self.inner = sorted((left & right) - summed), sorted(left & right & summed)
        self.rows, self.columns = sorted(left - right - summed), sorted(right - left - summed)

    def count(self, dims: Iterable[int]) -> int:
        return math.prod(self.sizes[d] for d in dims)

    def __call__(self, build: Builder) -> fx.Node:
        left = self._matrices(build, 0, self.batch, self.rows, self.inner)
        right = self._matrices(build, 1, self.batch, self.inner, self.columns)
        order = [*self.batch, *self.rows, *self.columns]
        result = build.view(build(aten.bmm.default, left, right), torch.Size(self.sizes[d] for d in order))
        # In memory as the sum lies: views of it may be read. Then dimensions of one element return.
        wanted, keepdim = self.node.meta["val"], len(self.node.args) > 2 and self.node.args[2]
        there = [d for d in range(len(self.sizes)) if keepdim or d not in self.summed]
        memory = sorted(order, key=lambda d: -wanted.stride(there.index(d)))
        result = _in_order(build, result, [order.index(d) for d in memory])
        result = build.permute(result, [memory.index(d) for d in sorted(order)])
        for i, d in enumerate(there):
            result = result if d in order else build(aten.unsqueeze.default, result, i)
        return result

    def _matrices(self, build: Builder, which: int, *dims: list[int]) -> fx.Node:
        """One factor as a batch of matrices: each list of ``dims`` is flattened to one dimension. Dimensions that only
        this factor has, and that the result lacks, are summed first."""
        x, held = self.factors[which], sorted(self.held[which])
        absent = len(self.sizes) - x.meta["val"].ndim
        for d in reversed(range(x.meta["val"].ndim)):
            if d + absent not in held:
                x = build(aten.select.int, x, d, 0)
        order = [d for of_one in dims for d in of_one]
        if alone := [held.index(d) for d in held if d not in order]:
            x = build(aten.sum.dim_IntList, x, alone)
            held = [d for d in held if d in order]
        return build.view(_in_order(build, x, [held.index(d) for d in order]), torch.Size(map(self.count, dims)))


def _in_order(build: Builder, x: fx.Node, order: list[int]) -> fx.Node:
    """``x`` with its dimensions in this order, contiguous."""
    return build.contiguous(build.permute(x, order))


def _contraction(node: fx.Node, product: fx.Node) -> _Contraction | None:
    """What makes a matrix product of ``node``, if one is worth it."""
    whole, result = product.meta["val"], node.meta["val"]
    factors = [factor.meta["val"] for factor in product.args]
    if not whole.is_floating_point() or len({x.dtype for x in (whole, result, *factors)}) > 1 or not node.args[1]:
        return None
    if not all(isinstance(size, int) for size in whole.shape):
        return None
    held = [
        {d + whole.ndim - x.ndim for d, size in enumerate(x.shape) if size > 1 and x.stride(d) > 0} for x in factors
    ]
    found = _Contraction(node, product.args, held, {d % whole.ndim for d in node.args[1]})
    if any(size > 1 and d not in held[0] | held[1] for d, size in enumerate(whole.shape)):
        return None  # both factors are broadcast along a dimension
    if found.count(found.rows) == 1 or found.count(found.columns) == 1:
        return None
    return found if whole.numel() >= _GAIN * (sum(map(found.count, held)) + result.numel()) else None

"""Sums of broadcast products as matrix products.

Models that spell out a contraction, such as the chunks of Mamba-2's state-space scan in transformers, multiply two
tensors, each broadcast along dimensions of the other, and sum: a product of matrices, through a tensor of all
dimensions of both. Autograd gives its gradients the same form.
"""

import math
from collections.abc import Callable

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, take_place
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
        if len(product.users) > 1 or (contraction := _contraction(node, product)) is None:
            continue
        # Before the product: a factor may be written after it. In the strides of the sum: there may be views of it.
        take_place(node, Builder(product, node, before=product).traced(contraction, *product.args))
        erase_unread(node)
        report.changed += 1
        saved += product.meta["val"].numel()
    report.summary = f"{report.changed} of {report.matched} sums of products became matrix products"
    if saved:
        report.notes.append(f"{saved:,} products are never written out")


def _contraction(node: fx.Node, product: fx.Node) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """What gives ``node``, the sum of ``product``, from its factors by a matrix product, if that is worth it."""
    whole, result = product.meta["val"], node.meta["val"]
    factors = [factor.meta["val"] for factor in product.args]
    if not whole.is_floating_point() or len({x.dtype for x in (whole, result, *factors)}) > 1 or not node.args[1]:
        return None
    if not all(isinstance(size, int) for size in whole.shape):
        return None
    summed = {d % whole.ndim for d in node.args[1]}
    # The dimensions of the product that each factor has and is not broadcast along; those of one element are nowhere.
    held = [
        {d + whole.ndim - x.ndim for d, size in enumerate(x.shape) if size > 1 and x.stride(d) > 0} for x in factors
    ]
    left, right = held

    def count(dims: set[int]) -> int:
        return math.prod(whole.shape[d] for d in dims)

    if any(size > 1 and d not in left | right for d, size in enumerate(whole.shape)):
        return None  # both factors are broadcast along a dimension
    if count(left - right - summed) == 1 or count(right - left - summed) == 1:
        return None
    if whole.numel() < _GAIN * (count(left) + count(right) + result.numel()):
        return None

    def contract(*factors: torch.Tensor) -> torch.Tensor:
        given: list[torch.Tensor | list[int]] = []
        for x, dims in zip(factors, held, strict=True):
            first = whole.ndim - x.ndim
            given += [x[tuple(slice(None) if d in dims else 0 for d in range(first, whole.ndim))], sorted(dims)]
        return torch.einsum(*given, sorted((left | right) - summed)).view(result.shape)

    return contract

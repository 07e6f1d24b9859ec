"""Gradients that attention gives apart, side by side for the products of a fused projection, with its bias's gradient.

    y = cat([dq, dk, dv], -1), y.sum(0)    ->    y, db = concat_sums(dq, dk, dv)

Matches a concatenation of two or three tensors along their last dimension that only products and sums over all rows
read. Saves a read of y and two kernels for each projection with a bias.
Tier numerics: sums add in another order. Preconditions: 16 bits on a GPU, widths that are multiples of `WIDTH`, parts
that lie in memory as they are.
"""

import operator
from dataclasses import dataclass

import torch

from stepgraph.graph.edit import Builder
from stepgraph.graph.edit import replace as replace_node
from stepgraph.kernels.concat_sums import WIDTH
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.matmul.epilogues import feeds_products, replace_sums, sums_of_rows

aten, ours = torch.ops.aten, torch.ops.stepgraph


@dataclass(frozen=True)
class ConcatOptions:
    """``least``: elements of the result from which on it is replaced: a smaller one lies in the cache. ``width``: what
    each part's width is a multiple of."""

    least: int = 1 << 22
    width: int = WIDTH


@register(
    "concat_sums", "numerics", options=ConcatOptions(), after=("product_epilogues", "fuse_casts"), needs_cuda=True
)
def concat_sums(step: StepGraph, options: ConcatOptions, report: PassReport) -> None:
    """Concatenate gradients for a fused projection and add up its bias's gradient in one kernel."""
    for node in step.calling(aten.cat.default):
        y, parts = node.meta["val"], list(node.args[0])
        values = [part.meta["val"] for part in parts]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if y.ndim < 2 or dim % y.ndim != y.ndim - 1 or len(parts) not in (2, 3):
            continue
        sums = list(sums_of_rows(node, torch.Size((y.shape[:-1].numel(), y.shape[-1]))))
        if not sums or not feeds_products(node, besides=sums):
            continue
        report.matched += 1
        able = y.dtype in (torch.bfloat16, torch.float16) and y.numel() >= options.least
        if not able or any(v.shape[-1] % options.width or not v.is_contiguous() for v in (y, *values)):
            continue
        build = Builder(node, *sums, before=node)
        both = build(ours.concat_sums.default, *parts, *[None] * (3 - len(parts)))
        new, total = (build(operator.getitem, both, i) for i in range(2))
        replace_node(node, new)
        replace_sums(sums, total)
        report.changed += 1
    if left := report.matched - report.changed:
        report.notes.append(f"{left} stay as they are: small, not in 16 bits, of odd widths or not contiguous")
    report.summary = f"{report.changed} of {report.matched} concatenated gradients with their sums"

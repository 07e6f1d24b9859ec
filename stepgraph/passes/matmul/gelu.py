"""GELU between products, and its gradient with that of the bias, in our kernels.

    a = gelu(z)                          ->  a = gelu_rows(z)
    dz = gelu_backward(da, z), dz.sum(0)  ->  dz, db = gelu_rows_backward(da, z)

Matches large GELUs, also those written out (see `gelu_formula`), that only products read, and gradients of GELU that
products make and that only products and sums over all rows read: a compiler would fuse other neighbours with them.
Tier numerics: GELU to within a rounding of fp32, and sums of what is not rounded yet. Preconditions: 16 bits on a GPU.
Runs after `product_epilogues`, which can take them into the products.
Source: as `stepgraph.kernels.gelu_rows`.
"""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import argument, behind_reshapes, only_user
from stepgraph.kernels import gelu_rows  # noqa: F401  (defines operators of torch.ops.stepgraph)
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.matmul.gelu_formula import name_gelus
from stepgraph.passes.matmul.pairs import feeds_products, replace_sums, sums_of_rows

aten, ours = torch.ops.aten, torch.ops.stepgraph


@dataclass(frozen=True)
class GeluOptions:
    """``least``: the fewest elements of a GELU that is replaced: smaller ones fit in the cache."""

    least: int = 1 << 22
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


@register("gelu_kernels", "numerics", options=GeluOptions(), after=("product_epilogues", "fuse_norm"), needs_cuda=True)
def gelu_kernels(step: StepGraph, options: GeluOptions, report: PassReport) -> None:
    """Run GELU between products, and its gradient with the bias's, by our kernels."""

    def able(value: torch.Tensor) -> bool:
        return value.dtype in options.dtypes and value.numel() >= options.least and value.ndim > 1

    sums = 0
    name_gelus(step, able)
    for target in (aten.gelu.default, aten.gelu_backward.default):
        for node in step.calling(target):
            report.matched += 1
            fits = able(node.meta["val"]) and all(n.meta["val"].is_contiguous() for n in (node, *node.all_input_nodes))
            if fits and target is aten.gelu.default and feeds_products(node):
                z, approximate = node.args[0], argument(node, "approximate")
                replace_node(node, Builder(node, before=node)(ours.gelu_rows.default, z, approximate))
            elif fits and target is not aten.gelu.default and (found := _sums(node)) is not None:
                _rewrite_backward(node, found)
                sums += len(found)
            else:
                continue
            report.changed += 1
    if left := report.matched - report.changed:
        report.notes.append(f"{left} left unchanged: small, not in 16 bits, not contiguous, or with other neighbours")
    report.summary = (
        f"{report.changed} of {report.matched} GELUs and GELU gradients, {sums} with the bias gradient's sum of rows"
    )


def _sums(node: fx.Node) -> list[fx.Node] | None:
    """The sums of the rows of a gradient that a product makes; None where it has other neighbours."""
    product, reader = behind_reshapes(node.args[0]), node
    if product.target is not aten.mm.default:
        return None
    while reader is not product:
        if only_user(reader.args[0]) is not reader:
            return None
        reader = reader.args[0]
    rows = node.meta["val"].numel() // node.meta["val"].shape[-1]
    sums = list(sums_of_rows(node, torch.Size((rows, node.meta["val"].shape[-1]))))
    return sums if feeds_products(node, besides=sums) else None


def _rewrite_backward(node: fx.Node, sums: list[fx.Node]) -> None:
    build = Builder(node, *sums, before=node)
    da, z = node.args[:2]
    both = build(ours.gelu_rows_backward.default, da, z, argument(node, "approximate"), bool(sums))
    dz, db = build.parts(both)
    replace_node(node, dz)
    replace_sums(sums, db)
    erase_unread(db)

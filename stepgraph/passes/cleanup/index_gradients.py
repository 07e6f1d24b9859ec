"""Gradients of indexing without a second check of the indices. Exact."""

import torch
from torch import fx

from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import argument
from stepgraph.graph.provenance import phase_of
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten


@register("index_gradients", "exact", needs_cuda=True)
def index_gradients(step: StepGraph, options: object, report: PassReport) -> None:
    """Add up the gradient of an indexing without checking its indices again, as eager does.

    Matches the gradient of ``x[indices]``; before -> after: ``index_put(zeros, indices, g, accumulate=True)`` ->
    ``_index_put_impl(zeros, indices, g, accumulate=True, unsafe=True)``. Eager's autograd calls the latter, which
    relies on the check that forward made; under a trace it records the former, which first finds the smallest and the
    largest index. Not where forward did not read with the same indices.
    """
    read = {_key(n.args[1], n.args[0].meta["val"]) for n in step.calling(aten.index.Tensor)}
    for node in step.calling(aten.index_put.default):
        if phase_of(node) != "backward" or not argument(node, "accumulate"):
            continue
        report.matched += 1
        if _key(node.args[1], node.meta["val"]) in read:
            into, indices, values = node.args[:3]
            replace(node, Builder(node, before=node)(aten._index_put_impl.default, into, indices, values, True, True))
            report.changed += 1
    report.summary = f"{report.changed} of {report.matched} index gradients summed without a second bounds check"


def _key(indices: list[fx.Node | None], indexed: torch.Tensor) -> tuple:
    """The indexed tensor and the indices."""
    return tuple(indices), tuple(indexed.shape)

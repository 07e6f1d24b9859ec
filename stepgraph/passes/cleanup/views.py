"""Removes views that change nothing. Exact."""

import operator

import torch
from torch import fx

from stepgraph.graph.edit import replace
from stepgraph.graph.facts import is_overload, is_view
from stepgraph.passes.contract import PassReport, StepGraph, register


@register("remove_noop_views", "exact")
def remove_noop_views(step: StepGraph, options: object, report: PassReport) -> None:
    """Drop views, and chains of views, that give back what they started from.

    Before -> after: ``t(t(x))`` -> ``x``; ``view(x, x.shape)``, ``detach(x)``, ``alias(x)``, ``expand(x, x.shape)``
    -> ``x``, and ``x.set_(x)``, which ``torch.nn.utils.parametrize`` writes. A view is dropped if a tensor earlier in
    its chain has the same shape, strides and offset. An input is not returned itself, and a tensor that is reshaped in
    place replaces no other.
    """
    returned = set(step.graph.output_node().all_input_nodes)
    for node in list(step.graph.nodes):
        if node.target is torch.ops.aten.set_.source_Tensor and node.args[0] is node.args[1]:
            replace(node, node.args[0])
        if not is_view(node) or not is_overload(node):
            continue
        report.matched += 1
        base = None if reshaped_in_place(node) else _same_view(node)
        if base is not None and not (node in returned and base.op == "placeholder"):
            replace(node, base)
            report.changed += 1
    report.summary = f"{report.changed} of {report.matched} no-op views removed"


def _same_view(node: fx.Node) -> fx.Node | None:
    """The furthest node up the chain of views that is the same view of the storage."""
    layout, found, current = _layout(node.meta["val"]), None, node
    if layout is None:  # several views at once, which no one tensor can represent
        return None
    while is_view(current) and isinstance(current.args[0], fx.Node):
        current = current.args[0]
        if _layout(current.meta.get("val")) == layout and not reshaped_in_place(current):
            found = current
    return found


def _layout(value: object) -> tuple | None:
    """Where in its storage a tensor lies and how it is read; None for anything but one tensor, equal to no layout."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()


def reshaped_in_place(node: fx.Node) -> bool:
    """Whether an operator such as ``unsqueeze_`` changes the shape of the very tensor, or one of those, that ``node``
    makes."""
    for user in node.users:
        if is_overload(user) and torch.Tag.inplace_view in user.target.tags:
            return True
        if user.target is operator.getitem and reshaped_in_place(user):
            return True
    return False

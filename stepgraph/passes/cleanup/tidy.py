"""Clean-up: literal constants, views that change nothing, repeated casts and views, dead code. All exact."""

import operator

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_overload, is_pure, is_view
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten
_CASTS = {aten._to_copy.default}


@register("fold_constants", "exact")
def fold_constants(step: StepGraph, options: object, report: PassReport) -> None:
    """Evaluate casts and device copies of literals once.

    Matches ``lift_fresh_copy`` of a constant (``torch.tensor(...)`` in the model) and casts of it; before -> after:
    ``_to_copy(lift_fresh_copy(c))`` -> ``c'``. A literal on the host would otherwise be copied to the GPU in every
    step, which a CUDA graph cannot hold. Not where the model writes into the literal.
    """
    aliases = Aliases(step.graph)
    folded: set[fx.Node] = set()
    for node in list(step.graph.nodes):
        # A tensor that the user holds is read live: only literals, and what was folded from them, never change.
        copied = node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr"
        cast = node.target in _CASTS and node.args[0] in folded
        if not copied and not cast:
            continue
        report.matched += 1
        if aliases.writes.get(aliases.root(node)):
            continue
        with torch.no_grad():
            value = node.target(getattr(step.module, node.args[0].target), **node.kwargs)
        name = f"_literal_{node.name}"
        step.module.register_buffer(name, value, persistent=False)
        with step.graph.inserting_before(node):
            constant = step.graph.get_attr(name)
        constant.meta.update(node.meta)
        folded.add(constant)
        node.replace_all_uses_with(constant)
        step.graph.erase_node(node)
        report.changed += 1
    report.summary = f"{report.changed} literals evaluated once"


@register("remove_noop_views", "exact")
def remove_noop_views(step: StepGraph, options: object, report: PassReport) -> None:
    """Drop views, and chains of views, that give back what they started from.

    Before -> after: ``t(t(x))`` -> ``x``; ``view(x, x.shape)``, ``detach(x)``, ``alias(x)``, ``expand(x, x.shape)``
    -> ``x``. A view is dropped if a tensor earlier in its chain has the same shape, strides and offset. An input is
    not returned itself, and a tensor that is reshaped in place stands for no other.
    """
    returned = set(step.graph.output_node().all_input_nodes)
    for node in list(step.graph.nodes):
        if not is_view(node) or not is_overload(node):
            continue
        report.matched += 1
        base = None if _reshaped_in_place(node) else _same_view(node)
        if base is not None and not (node in returned and base.op == "placeholder"):
            node.replace_all_uses_with(base)
            step.graph.erase_node(node)
            report.changed += 1
    report.summary = f"{report.changed} of {report.matched} views change nothing"


def _same_view(node: fx.Node) -> fx.Node | None:
    """The furthest node up the chain of views that is the same view of the storage."""
    layout, found, current = _layout(node.meta["val"]), None, node
    if layout is None:  # several views at once, which no one tensor can stand for
        return None
    while is_view(current) and isinstance(current.args[0], fx.Node):
        current = current.args[0]
        if _layout(current.meta.get("val")) == layout and not _reshaped_in_place(current):
            found = current
    return found


def _layout(value: object) -> tuple | None:
    """Where in its storage a tensor lies and how it is read; None for anything but one tensor, equal to no layout."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()


def _reshaped_in_place(node: fx.Node) -> bool:
    """Whether an operator such as ``unsqueeze_`` changes the shape of the very tensor, or one of those, that ``node``
    makes."""
    return any(
        torch.Tag.inplace_view in user.target.tags if is_overload(user) else _is_part(user) and _reshaped_in_place(user)
        for user in node.users
    )


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


@register("dedupe_casts", "exact")
def dedupe_casts(step: StepGraph, options: object, report: PassReport) -> None:
    """Make each cast and each view once per phase, and none where a cast returns to where it came from.

    Before -> after: two equal casts (or views) of one tensor in one phase -> the first; ``bf16(fp32(x))`` with x in
    bf16 -> ``x``; a cast to the dtype and device x already has -> ``x``. Not across a write to the tensor, nor where
    a copy is written to or returned; not across phases, which would keep the cast alive in between.
    """
    aliases = Aliases(step.graph)
    returned = {aliases.root(n) for n in step.graph.output_node().all_input_nodes}
    seen: dict[tuple, fx.Node] = {}
    for node in list(step.graph.nodes):
        cast = node.target in _CASTS
        if not cast and not (is_view(node) and is_overload(node)):
            continue
        report.matched += 1
        here = aliases.position[node]
        if cast:
            if aliases.writes.get(node) or node in returned:
                continue
            base = _before_casts(node, aliases)
            if base is not None:
                node.replace_all_uses_with(base)
                step.graph.erase_node(node)
                report.changed += 1
                continue
        key = (node.target, str(node.args), str(node.kwargs), phase_of(node))
        first = seen.get(key)
        written = cast and first and aliases.written_between(node.args[0], aliases.position[first], here)
        if first is None or written or _reshaped_in_place(first) or _reshaped_in_place(node):
            seen[key] = node
            continue
        node.replace_all_uses_with(first)
        step.graph.erase_node(node)
        report.changed += 1
    report.summary = f"{report.changed} of {report.matched} casts and views repeated or returning"


def _before_casts(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The tensor that a chain of widening casts ending in ``node`` gives back unchanged, if there is one.

    The copy may stand for it only while neither it nor a cast between is written.
    """
    source, value = node.args[0], node.meta["val"]
    while not aliases.written_between(source, aliases.position[source], len(aliases.position)):
        given = source.meta["val"]
        form = [(v.dtype, v.device, v.stride(), v.is_conj(), v.is_neg()) for v in (given, value)]
        if form[0] == form[1]:
            return source
        widened = source.target in _CASTS and _holds(given.dtype, source.args[0].meta["val"].dtype)
        if not widened or set(source.kwargs) - {"dtype"}:
            return None
        source = source.args[0]
    return None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is a value of ``wide``, so that the round trip is exact."""
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    # Eight-bit formats are left alone: torch knows no type that holds one and another.
    return min(wide.itemsize, narrow.itemsize) > 1 and torch.promote_types(wide, narrow) == wide


@register("dead_code", "exact")
def dead_code(step: StepGraph, options: object, report: PassReport) -> None:
    """Remove nodes whose result nothing uses, except those that write or draw random numbers."""
    report.matched = len(step.graph.nodes)
    for node in reversed(list(step.graph.nodes)):
        if not node.users and is_pure(node):
            step.graph.erase_node(node)
            report.changed += 1
    report.summary = f"{report.changed} unused nodes removed"

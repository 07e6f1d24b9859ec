"""Removes casts and views that are made twice or return to their input. Exact."""

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import replace
from stepgraph.graph.facts import is_overload, is_view
from stepgraph.graph.provenance import phase_of
from stepgraph.passes.cleanup.views import reshaped_in_place
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph


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
        cast = node.target is aten._to_copy.default
        scaled = node.target is ours.cast_scaled_rows.default  # of layers in fp8 that share an input
        if not cast and not scaled and not (is_view(node) and is_overload(node)):
            continue
        report.matched += 1
        here = aliases.position[node]
        if cast:
            if aliases.writes.get(node) or node in returned:
                continue
            base = _before_casts(node, aliases)
            if base is not None:
                replace(node, base)
                report.changed += 1
                continue
        key = (node.target, str(node.args), str(node.kwargs), phase_of(node))
        first = seen.get(key)
        written = (cast or scaled) and first and aliases.written_between(node.args[0], aliases.position[first], here)
        if first is None or written or reshaped_in_place(first) or reshaped_in_place(node):
            seen[key] = node
            continue
        replace(node, first)
        report.changed += 1
    report.summary = f"{report.changed} of {report.matched} duplicate or round-trip casts and views removed"


def _before_casts(node: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The tensor that a chain of widening casts ending in ``node`` gives back unchanged, if there is one.

    The copy may replace it only while neither it nor a cast between is written.
    """
    source, value = node.args[0], node.meta["val"]
    while not aliases.written_between(source, aliases.position[source], len(aliases.position)):
        given = source.meta["val"]
        form = [(v.dtype, v.device, v.stride(), v.is_conj(), v.is_neg()) for v in (given, value)]
        if form[0] == form[1]:
            return source
        widened = source.target is aten._to_copy.default and _holds(given.dtype, source.args[0].meta["val"].dtype)
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

"""Removes masks and clamps that change no possible value. Exact.

Experts of transformers mask rows of experts that another rank holds, on one rank too: five masks over the widest rows
of a layer, of comparisons that the top-k before them has decided.
"""

import operator

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import replace
from stepgraph.graph.facts import argument, is_view
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
#: Operators whose first result is values of their input, and whose second is their positions along a dimension.
_PLACES = (aten.topk.default, aten.sort.default, aten.sort.stable)
#: Operators whose result holds values of their first argument alone.
_COPIES = (aten.clone.default, aten.index.Tensor, aten.gather.default, aten.index_select.default)
_CLAMPS = (aten.clamp.default, aten.clamp_.default)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)


@register("false_masks", "exact")
def false_masks(step: StepGraph, options: object, report: PassReport) -> None:
    """Drop masks that are false, and clamps that hold, whatever values come.

    Matches ``masked_fill`` and ``clamp``, in place or not; before -> after: ``masked_fill(x, ids >= E, v)`` with
    ``ids`` chosen by ``topk`` among E -> ``x``; ``clamp(ids, max=E - 1)`` -> ``ids``. Known are the bounds of places
    (topk, sort) and of what is indexed, viewed or copied of them. Not where a write, or a copy that is written or
    returned, comes between.
    """
    aliases = Aliases(step.graph)
    returned = {aliases.root(n) for n in step.graph.output_node().all_input_nodes}
    for node in [n for n in step.graph.nodes if n.target in (*_CLAMPS, *_FILLS)]:
        report.matched += 1
        fills = node.target in _FILLS
        if (_is_false(node.args[1], node, aliases) if fills else _holds(node, aliases)) and _may_go(
            node, aliases, returned
        ):
            replace(node, node.args[0], sweep=True)
            report.changed += 1
    report.summary = f"{report.changed} of {report.matched} masks and clamps without effect removed"


def _holds(clamp: fx.Node, aliases: Aliases) -> bool:
    """Whether ``clamp`` gives back every number that can come."""
    found, least, most = _largest(clamp.args[0], clamp, aliases), argument(clamp, "min"), argument(clamp, "max")
    return found is not None and (least is None or least <= 0) and (most is None or most >= found)


def _is_false(mask: fx.Node, reader: fx.Node, aliases: Aliases) -> bool:
    """Whether every element of ``mask`` is false as ``reader`` reads it."""
    if not _is_as_made(mask, reader, aliases):
        return False
    if is_view(mask):
        return _is_false(mask.args[0], reader, aliases)
    found = _largest(mask.args[0], mask, aliases) if mask.target is aten.ge.Scalar else None
    return found is not None and found < mask.args[1]


def _largest(node: fx.Node, reader: fx.Node, aliases: Aliases) -> int | None:
    """The largest number that ``node`` can hold as ``reader`` reads it, of whole numbers from 0 upwards; or None."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.numel() or value.dtype not in (torch.int64, torch.int32):
        return None
    if not _is_as_made(node, reader, aliases):
        return None
    if is_view(node):
        return _largest(node.args[0], reader, aliases)
    if node.target is not operator.getitem:
        return _largest(node.args[0], node, aliases) if node.target in _COPIES else None
    source, index = node.args
    if source.target not in _PLACES:
        return None
    read = source.args[0].meta["val"]
    if index == 0:
        return _largest(source.args[0], node, aliases)
    return (read.shape[argument(source, "dim")] if read.ndim else 1) - 1


def _is_as_made(node: fx.Node, reader: fx.Node, aliases: Aliases) -> bool:
    """Whether nothing has written into ``node`` before ``reader``."""
    return node.op == "call_function" and not aliases.written_between(node, -1, aliases.position[reader])


def _may_go(node: fx.Node, aliases: Aliases, returned: set[fx.Node]) -> bool:
    """Whether what ``node`` reads may take its place."""
    same = node.args[0]
    forms = [(v.shape, v.stride(), v.dtype, v.device) for v in (same.meta["val"], node.meta["val"])]
    if forms[0] != forms[1] or aliases.root(same) is aliases.root(node):  # in place
        return forms[0] == forms[1]
    root, here = aliases.root(node), aliases.position[node]
    unwritten = not aliases.writes.get(root) and not aliases.written_between(same, here, len(aliases.position))
    return unwritten and root not in returned

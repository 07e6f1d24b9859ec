"""Removes masks and clamps that change no possible value. Exact.

Experts of transformers mask rows of experts that another rank holds, on one rank too: five masks over the widest rows
of a layer, of comparisons that the top-k before them has decided.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import erase_unread, replace
from stepgraph.graph.facts import argument, is_view
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
#: By comparison with a number: for the smallest and largest value that can come, whether it always or never holds.
_COMPARISONS: dict[object, Callable[[int, int, float], tuple[bool, bool]]] = {
    aten.ge.Scalar: lambda low, high, n: (low >= n, high < n),
    aten.gt.Scalar: lambda low, high, n: (low > n, high <= n),
    aten.le.Scalar: lambda low, high, n: (high <= n, low > n),
    aten.lt.Scalar: lambda low, high, n: (high < n, low >= n),
    aten.ne.Scalar: lambda low, high, n: (n < low or n > high, low == high == n),
    aten.eq.Scalar: lambda low, high, n: (low == high == n, n < low or n > high),
}
#: Operators whose first result is values of what they read, and whose second is their places along a dimension.
_PLACES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
#: Operators whose result holds values of their first argument alone.
_COPIES = (aten.clone.default, aten.index.Tensor, aten.gather.default, aten.index_select.default)
_CLAMPS = (aten.clamp.default, aten.clamp_.default)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)


@register("false_masks", "exact")
def false_masks(step: StepGraph, options: object, report: PassReport) -> None:
    """Drop masks that are false, and clamps that hold, whatever values come.

    Matches ``masked_fill``, ``where`` and ``clamp``, in place or not; before -> after: ``masked_fill(x, ids >= E, v)``
    with ``ids`` chosen by ``topk`` among E -> ``x``; ``where(false, x, y)`` -> ``y``; ``clamp(ids, max=E - 1)`` ->
    ``ids``. Known are the bounds of places (topk, sort, argmax, arange) and of what is indexed, viewed or copied of
    them. Not where a write, or a copy that is written or returned, comes between.
    """
    known = _Bounds(step.graph)
    returned = {known.aliases.root(n) for n in step.graph.output_node().all_input_nodes}
    for node in list(step.graph.nodes):
        if node.target not in (*_CLAMPS, *_FILLS, aten.where.self):
            continue
        report.matched += 1
        same = known.unchanged(node)
        if same is None or not _may_stand(same, node, known.aliases, returned):
            continue
        read = node.all_input_nodes
        replace(node, same)
        erase_unread(*read)
        report.changed += 1
    report.summary = f"{report.changed} of {report.matched} masks and clamps change nothing"


class _Bounds:
    """What is known of the values in a graph."""

    def __init__(self, graph: fx.Graph):
        self.aliases = Aliases(graph)

    def unchanged(self, node: fx.Node) -> fx.Node | None:
        """The argument that a mask or clamp gives back as it is."""
        here = self.aliases.position[node]
        if node.target in _FILLS:
            return node.args[0] if self._truth(node.args[1], here) is False else None
        if node.target is aten.where.self:
            truth = self._truth(node.args[0], here)
            return None if truth is None else node.args[1 if truth else 2]
        bounds, least, most = self._bounds(node.args[0], here), argument(node, "min"), argument(node, "max")
        if bounds is None or (least is not None and bounds[0] < least) or (most is not None and bounds[1] > most):
            return None
        return node.args[0]

    def _truth(self, mask: fx.Node, here: int) -> bool | None:
        """What every element of ``mask`` is, as read at position ``here``."""
        if not self._as_made(mask, here):
            return None
        if is_view(mask):
            return self._truth(mask.args[0], here)
        if mask.target not in _COMPARISONS or not isinstance(mask.args[1], (int, float)):
            return None
        bounds = self._bounds(mask.args[0], self.aliases.position[mask])
        if bounds is None:
            return None
        always, never = _COMPARISONS[mask.target](*bounds, mask.args[1])
        return True if always else False if never else None

    def _bounds(self, node: fx.Node, here: int) -> tuple[int, int] | None:
        """The smallest and the largest integer that ``node`` can hold, as read at position ``here``."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.dtype not in (torch.int64, torch.int32):
            return None
        if not self._as_made(node, here):
            return None
        if is_view(node):
            return self._bounds(node.args[0], here)
        made = self.aliases.position[node]
        if node.target is operator.getitem:
            source, index = node.args
            if source.target not in _PLACES:
                return None
            return self._bounds(source.args[0], made) if index == 0 else _places(source, argument(source, "dim"))
        if node.target in (aten.argmax.default, aten.argmin.default):
            return _places(node, argument(node, "dim"))
        if node.target is aten.arange.default and isinstance(node.args[0], int):
            return 0, node.args[0] - 1
        if node.target in _COPIES or (node.target is aten._to_copy.default and _holds(node.args[0], value.dtype)):
            return self._bounds(node.args[0], made)
        return None

    def _as_made(self, node: fx.Node, here: int) -> bool:
        """Whether nothing has written into ``node`` before ``here``."""
        return node.op == "call_function" and not self.aliases.written_between(node, -1, here)


def _places(node: fx.Node, dim: int | None) -> tuple[int, int]:
    """The bounds of places along ``dim`` of what ``node`` reads; of all its elements for None."""
    value = node.args[0].meta["val"]
    return 0, (value.numel() if dim is None or value.ndim == 0 else value.shape[dim]) - 1


def _holds(source: fx.Node, dtype: torch.dtype) -> bool:
    return source.meta["val"].dtype in (torch.int32, torch.int64) and dtype == torch.int64


def _may_stand(same: fx.Node, node: fx.Node, aliases: Aliases, returned: set[fx.Node]) -> bool:
    """Whether ``same`` may take the place of ``node``, which holds the same values."""
    forms = [(v.shape, v.stride(), v.dtype, v.device) for v in (same.meta["val"], node.meta["val"])]
    if forms[0] != forms[1]:
        return False
    if aliases.root(same) is aliases.root(node):  # in place
        return True
    here = aliases.position[node]
    return (
        not aliases.writes.get(aliases.root(node))
        and aliases.root(node) not in returned
        and not aliases.written_between(same, here, len(aliases.position))
    )

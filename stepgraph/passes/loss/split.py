"""The cross entropy over a vocabulary that ranks share, as `fuse_loss` rewrites it: two visits to the logits.

Matches, on (M, V) logits or their cast to fp32: the maximum of each row and its all-reduce; the row's sum of
``exp(x - maximum)``; the gather of the target's logit; in backward ``(exp(x - log_sum) - onehot) * slope``.

    before: amax; cast, sub, exp, sum; gather        after: ``stepgraph::softmax_parts``, a gather from the logits
            cast, sub, exp, eq, sub, mul, cast              ``stepgraph::split_gradient_``, over the logits

The collectives and the numbers per row between the two stay as they are.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.facts import Aliases, is_view
from stepgraph.graph.provenance import provenance, set_provenance
from stepgraph.kernels.loss.split import softmax_parts, split_gradient_

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class SplitLoss:
    """The nodes of one loss. ``logits``: before the cast to fp32. ``amax``, ``highest``: a row's maximum here and over
    all ranks. ``total``: the sum of exponentials. ``picked``: the gathers. ``slopes``: the gradient of the logits, made
    from ``log_sum``, ``column`` and ``slope``, one number a row each. ``private``: nothing else reads the logits."""

    logits: fx.Node
    amax: fx.Node
    highest: fx.Node
    total: fx.Node
    picked: list[fx.Node]
    slopes: fx.Node
    log_sum: fx.Node
    column: fx.Node
    slope: fx.Node
    private: bool

    def rewrite(self, aliases: Aliases) -> list[fx.Node]:
        """Put the operators in their places; the nodes that may have no reader left."""
        graph = self.amax.graph
        with graph.inserting_before(self.amax):
            parts = self._call(self.amax, softmax_parts._opoverload, self.logits)
            here = self._call(self.amax, operator.getitem, parts, 0)
            below = self._call(self.amax, operator.getitem, parts, 1)
        with graph.inserting_before(self.total):
            # The sum below the maximum of all ranks, from that below this rank's own.
            shift = self._call(self.total, aten.sub.Tensor, here, self.highest)
            scale = self._call(self.total, aten.exp.default, shift)
            total = self._call(self.total, aten.mul.Tensor, below, scale)
        for gather in self.picked:
            with graph.inserting_before(gather):
                narrow = self._call(gather, aten.gather.default, self.logits, *gather.args[1:])
                wide = self._cast(gather, narrow, gather.meta["val"].dtype)
            gather.replace_all_uses_with(wide)
        with graph.inserting_before(self.slopes):
            into = self.logits
            if not self.private:
                into = self._call(self.slopes, aten.clone.default, into, memory_format=torch.contiguous_format)
            self._call(self.slopes, split_gradient_._opoverload, into, self.log_sum, self.column, self.slope)
        self.amax.replace_all_uses_with(here)
        self.total.replace_all_uses_with(total)
        self.slopes.replace_all_uses_with(into)
        return [self.slopes, self.total, *self.picked, self.amax]

    def _cast(self, place: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype == dtype else self._call(place, aten._to_copy.default, node, dtype=dtype)

    def _call(self, place: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
        """A node with the provenance of ``place``."""
        node = place.graph.call_function(target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.logits.meta["val"].fake_mode, torch.no_grad():
            node.meta["val"] = target(*values, **options)
        set_provenance(node, provenance(place))
        return node


def match(amax: fx.Node, aliases: Aliases) -> SplitLoss | str | None:
    """The loss that begins with the maximum ``amax``; None where there is none, or why it cannot be rewritten."""
    highest = _reduced(amax)
    if highest is None or not _is_wide_matrix(amax.args[0]) or amax.args[1] not in ([1], [-1]):
        return None
    logits = _before_cast(amax.args[0])
    wide = [logits, *(user for user in logits.users if _is_cast(user))]
    readers = [user for node in wide for user in node.users if not _is_cast(user)]
    totals = [sums for reader in readers for sums in _sums(reader, highest)]
    if len(totals) != 1:
        return None
    (total,) = totals
    gradients = [(reader, *found) for reader in readers for found in _gradients(reader, logits)]
    if len(gradients) != 1:
        return "backward does not make its gradient of it, or is not there"
    ((below, slopes, log_sum, column, slope),) = gradients
    picked = [user for user in readers if user.target is aten.gather.default and user.args[1] in (1, -1)]
    if logits.meta["val"].dtype not in _DTYPES:
        return f"logits in {logits.meta['val'].dtype}"
    root = aliases.root(logits)
    if aliases.writes.get(root):
        return "its logits are written to"
    ours = {amax, _shifted(total), below, *picked}
    ours |= {node for node in wide if node is not logits and ours.issuperset(node.users)}
    used = {u for node in aliases.position if aliases.root(node) is root for u in node.users if not is_view(u)}
    private = root.op == "call_function" and logits.meta["val"].is_contiguous() and used <= ours
    return SplitLoss(logits, amax, highest, total, picked, slopes, log_sum, column, slope, private)


def _reduced(amax: fx.Node) -> fx.Node | None:
    """The maximum over ranks of ``amax``, waited for."""
    for user in amax.users:
        if user.target is collectives.all_reduce.default and user.args[1] == "max":
            return _then(user, collectives.wait_tensor.default)
    return None


def _sums(shifted: fx.Node, highest: fx.Node) -> Iterator[fx.Node]:
    """``sum(exp(x - highest))`` over columns, of which ``shifted`` may be the difference."""
    if _is_minus_column(shifted, highest) and (exp := _then(shifted, aten.exp.default)):
        total = _then(exp, aten.sum.dim_IntList)
        if total is not None and total.args[1:] in (([1],), ([-1],)) and not total.kwargs:
            yield total


def _shifted(total: fx.Node) -> fx.Node:
    return total.args[0].args[0]


def _gradients(shifted: fx.Node, logits: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, fx.Node]]:
    """(gradient, log sum, column, slope) of ``(exp(x - log_sum) - onehot(column)) * slope`` in the logits' dtype."""
    if not _is_minus_column(shifted) or (exp := _then(shifted, aten.exp.default)) is None:
        return
    minus = _then(exp, aten.sub.Tensor)
    product = minus and _then(minus, aten.mul.Tensor)
    if product is None or minus.args[0] is not exp or minus.kwargs or product.args[0] is not minus:
        return
    column, slope = _one_hot(minus.args[1], logits.meta["val"].shape[1]), _column(product.args[1])
    narrow = logits.meta["val"].dtype
    slopes = product if narrow == product.meta["val"].dtype else _then(product, aten._to_copy.default)
    if column is not None and slope is not None and slopes is not None and slopes.meta["val"].dtype == narrow:
        yield slopes, _column(shifted.args[1]), column, slope


def _one_hot(node: fx.Node, columns: int) -> fx.Node | None:
    """``c`` (M,) of a cast of ``arange(columns) == c[:, None]``."""
    equal = node.args[0] if node.target is aten._to_copy.default else None
    if equal is None or equal.target is not aten.eq.Tensor:
        return None
    numbers, column = equal.args
    whole = numbers.target is aten.arange.default and numbers.args == (columns,)
    return _column(column) if whole else None


def _is_minus_column(node: fx.Node, column: fx.Node | None = None) -> bool:
    """Whether the node is a matrix minus a column (``column``, if given)."""
    if node.target is not aten.sub.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    found = _column(node.args[1])
    return found is not None and column in (None, found)


def _column(node: fx.Node) -> fx.Node | None:
    """``c`` (M,) of ``c[:, None]``."""
    return node.args[0] if node.target is aten.unsqueeze.default and node.args[1] in (1, -1) else None


def _then(node: fx.Node, target: object) -> fx.Node | None:
    """The only reader of ``node``, if it calls ``target``."""
    return next((user for user in node.users if user.target is target), None) if len(node.users) == 1 else None


def _is_wide_matrix(node: fx.Node) -> bool:
    return node.meta["val"].ndim == 2 and node.meta["val"].dtype == torch.float32


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and node.meta["val"].dtype == torch.float32


def _before_cast(node: fx.Node) -> fx.Node:
    """What ``node`` is a cast of, or ``node``."""
    return node.args[0] if _is_cast(node) and node.args[0].meta["val"].dtype in _DTYPES else node

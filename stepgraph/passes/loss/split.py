"""The cross entropy over a vocabulary that is sharded over ranks, as `fuse_loss` rewrites it: two passes over the
logits, one in forward and one in backward.

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

import stepgraph.kernels.loss.split  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_cast, is_view, only_user

aten = torch.ops.aten
ours = torch.ops.stepgraph
collectives = torch.ops._c10d_functional
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class SplitLoss:
    """The nodes of one loss. ``logits``: before the cast to fp32. ``amax``, ``highest``: a row's maximum here and over
    all ranks. ``total``: the sum of exponentials. ``picked``: the gathers of the targets' logits. ``gradient``: that of
    the logits, made from ``log_sum``, ``column`` and ``slope``, one number a row each. ``private``: nothing else reads
    the logits."""

    logits: fx.Node
    amax: fx.Node
    highest: fx.Node
    total: fx.Node
    picked: list[fx.Node]
    gradient: fx.Node
    log_sum: fx.Node
    column: fx.Node
    slope: fx.Node
    private: bool

    def rewrite(self, aliases: Aliases) -> None:
        """Put the operators in their places."""
        build = Builder(self.amax, before=self.amax)
        parts = build(ours.softmax_parts.default, self.logits)
        here, below = (build(operator.getitem, parts, i) for i in range(2))
        build = Builder(self.total, before=self.total)
        # The sum below the maximum of all ranks, from that below this rank's own.
        scale = build(aten.exp.default, build(aten.sub.Tensor, here, self.highest))
        total = build(aten.mul.Tensor, below, scale)
        for gather in self.picked:
            build = Builder(gather, before=gather)
            narrow = build(aten.gather.default, self.logits, *gather.args[1:])
            gather.replace_all_uses_with(build.cast(narrow, gather.meta["val"].dtype))
        build, into = Builder(self.gradient, before=self.gradient), self.logits
        if not self.private:
            into = build(aten.clone.default, into, memory_format=torch.contiguous_format)
        build(ours.split_gradient_.default, into, self.log_sum, self.column, self.slope)
        self.amax.replace_all_uses_with(here)
        self.total.replace_all_uses_with(total)
        self.gradient.replace_all_uses_with(into)
        erase_unread(self.amax, *self.picked, self.total, self.gradient)


def match(amax: fx.Node, aliases: Aliases) -> SplitLoss | str | None:
    """The loss that begins with the maximum ``amax``, or why it cannot be rewritten; None where there is none."""
    highest = _reduced(amax)
    if highest is None or not _is_wide_matrix(amax.args[0]) or amax.args[1] not in ([1], [-1]):
        return None
    logits = _before_widening(amax.args[0])
    wide = [logits, *(user for user in logits.users if _is_widening(user))]
    readers = [user for node in wide for user in node.users if not _is_widening(user)]
    totals = [sums for reader in readers for sums in _sums(reader, highest)]
    if len(totals) != 1:
        return None
    (total,) = totals
    gradients = [(reader, *found) for reader in readers for found in _gradients(reader, logits)]
    if len(gradients) != 1:
        return "its backward is another one, or is not there"
    ((below, gradient, log_sum, column, slope),) = gradients
    picked = [user for user in readers if user.target is aten.gather.default and user.args[1] in (1, -1)]
    if logits.meta["val"].dtype not in _DTYPES:
        return f"logits in {logits.meta['val'].dtype}"
    root = aliases.root(logits)
    if aliases.writes.get(root):
        return "its logits are written to"
    known = {amax, total.args[0].args[0], below, *picked}
    known |= {node for node in wide if node is not logits and known.issuperset(node.users)}
    used = {u for node in aliases.position if aliases.root(node) is root for u in node.users if not is_view(u)}
    private = root.op == "call_function" and logits.meta["val"].is_contiguous() and used <= known
    return SplitLoss(logits, amax, highest, total, picked, gradient, log_sum, column, slope, private)


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
    gradient = product if narrow == product.meta["val"].dtype else _then(product, aten._to_copy.default)
    if column is not None and slope is not None and gradient is not None and gradient.meta["val"].dtype == narrow:
        yield gradient, _column(shifted.args[1]), column, slope


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
    user = only_user(node)
    return user if user is not None and user.target is target else None


def _is_wide_matrix(node: fx.Node) -> bool:
    return node.meta["val"].ndim == 2 and node.meta["val"].dtype == torch.float32


def _is_widening(node: fx.Node) -> bool:
    return is_cast(node) and node.meta["val"].dtype == torch.float32


def _before_widening(node: fx.Node) -> fx.Node:
    """What ``node`` is a cast to fp32 of, or ``node``."""
    return node.args[0] if _is_widening(node) and node.args[0].meta["val"].dtype in _DTYPES else node

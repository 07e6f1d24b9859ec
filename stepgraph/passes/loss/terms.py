"""Sums of products of probabilities and log-probabilities, as losses over a vocabulary are written.

A node of such an expression is a polynomial in p and log p of softmaxes and in values of rows: ``g p (log p - log q)``
is ``{(g, p, log p): 1, (g, p, log q): -1}``. Two ways to write one thing have one polynomial.
"""

import itertools

import torch
from torch import fx

from stepgraph.graph.facts import is_cast
from stepgraph.passes.loss.head import RESHAPES, SAME

aten = torch.ops.aten
#: p or log p of the logits that a softmax takes, or a value of each row.
Symbol = tuple[str, fx.Node] | fx.Node
Terms = dict[tuple[Symbol, ...], float]

P, LOG = "p", "log"
SOFTMAXES = {aten._log_softmax.default: LOG, aten._softmax.default: P}
_MOST = 32  # terms of what is looked at


def times(one: Terms, other: Terms) -> Terms:
    """The product of two polynomials."""
    found: Terms = {}
    for (a, x), (b, y) in itertools.product(one.items(), other.items()):
        key = tuple(sorted((*a, *b), key=_order))
        found[key] = found.get(key, 0.0) + x * y
    return {key: value for key, value in found.items() if value}


def plus(one: Terms, other: Terms, factor: float = 1.0) -> Terms:
    """``one + factor * other``."""
    found = {key: one.get(key, 0.0) + factor * other.get(key, 0.0) for key in {**one, **other}}
    return {key: value for key, value in found.items() if value}


def _order(symbol: Symbol) -> tuple[str, str]:
    return ("", symbol.name) if isinstance(symbol, fx.Node) else (symbol[0], symbol[1].name)


class Reading:
    """The polynomials of a graph's nodes, each worked out once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Terms | None] = {}

    def __call__(self, node: fx.Node) -> Terms | None:
        """What ``node`` is; None if it is no such polynomial."""
        if node not in self._known:
            found = self._read(node)
            self._known[node] = None if found is None or len(found) > _MOST else found
        return self._known[node]

    def _read(self, node: fx.Node) -> Terms | None:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        if _is_of_row(node):
            return {(node,): 1.0}
        if target in SOFTMAXES:
            over = node.args[1] in (-1, value.ndim - 1)
            return {((SOFTMAXES[target], node.args[0]),): 1.0} if over else None
        if target is aten.expand.default:
            return {(node.args[0],): 1.0} if _is_of_row(node.args[0]) else None
        if is_cast(node) or target in SAME or (target in RESHAPES and _keeps_width(node)):
            return self(node.args[0])
        if node.kwargs or len(node.args) > 2:
            return None
        args = [self(a) if isinstance(a, fx.Node) else {(): float(a)} if isinstance(a, (int, float)) else None
                for a in node.args]  # fmt: skip
        if None in args:
            return None
        one, other = (*args, {})[:2]
        match target:
            case aten.exp.default if len(one) == 1:
                ((key, factor),) = one.items()
                return {((P, key[0][1]),): 1.0} if factor == 1 and len(key) == 1 and key[0][0] == LOG else None
            case aten.neg.default:
                return plus({}, one, -1.0)
            case aten.add.Tensor:
                return plus(one, other)
            case aten.sub.Tensor:
                return plus(one, other, -1.0)
            case aten.mul.Tensor | aten.mul.Scalar:
                return times(one, other)
            case aten.div.Tensor | aten.div.Scalar if other.keys() == {()}:
                return times(one, {(): 1 / other[()]})
            case aten.xlogy.Tensor if one == other and len(one) == 1:
                ((key, factor),) = one.items()
                return {(*key, (LOG, key[0][1])): 1.0} if factor == 1 and len(key) == 1 and key[0][0] == P else None
        return None


def _is_of_row(node: fx.Node) -> bool:
    """Whether ``node`` is one value for all of a row."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and (value.ndim == 0 or value.shape[-1] == 1)


def _keeps_width(node: fx.Node) -> bool:
    return node.args[0].meta["val"].shape[-1:] == node.meta["val"].shape[-1:]

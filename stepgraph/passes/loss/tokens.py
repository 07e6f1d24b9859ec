"""Heads and the softmax statistics of post-training losses, in chunks of tokens, as `fuse_loss` rewrites them.

Matches: ``_log_softmax`` (and ``_softmax``) of the logits z = ``x w^T`` (with a bias, a factor, casts, reshapes and
slices of rows between), read by a ``gather`` of one label per token, by sums over the vocabulary of z, log p, p log p,
p log q and q log p, where q is of another head without a gradient, and in backward by what their gradients become,
however they are written (see `Reading`). z itself may be read by ``logsumexp``, ``argmax`` and ``gather``. Losses of
classes are put in this form by `labels`. DPO, GRPO, entropy bonuses, z-losses, smoothed labels and distillation
(``F.kl_div``) have them.

    before: logits = x w^T                 after, for each part of the rows of x, one by one:
            logs = log_softmax(logits)             logits = x_i w^T
            log_prob = gather(logs)                log_prob_i, log_sum_i, entropy_i, mean_i = stats(logits)
            logsumexp(logits), sum(p log p)        kl_i, log_sums_i = kl_stats(logits, logits of the other head)
            sum(q (log q - logs))                  in backward: logits again, written over by their gradient
            dx, dw of the logits' gradient         dx_i = logits w; dw += logits^T x_i

In one part the logits are kept for backward, else their product is recomputed: no tensor in fp32, and none of all
logits. Views of logits become views of ``x``, and those of their gradient views of ``dx``.
Numbers: the operators compute in fp32 whatever ``logs`` has, and round once. ``dw`` as in `chunk`.

A sum of a p log p + b p log q + c q log q + d q log p is -(a + b) H(p) - b KL(p || q) - (c + d) H(q) - d KL(q || p).
The softmax's backward takes away what a gradient has of p itself, so that the gradient a p log p + b p log q + e q of
the log-probabilities is that of -(a + b) H(p) - b KL(p || q) - e KL(q || p). A sum of log p is V times the mean of z,
less V times its logarithm of a sum of exponentials, whose gradient for z is p.

`Reading` finds what a node is, however the loss is written: a polynomial in z, p and log p of softmaxes, in the
gradients that a softmax's backward or a gather's makes, and in values of rows. ``g p (log p - log q)`` is ``{(g, p, log
p): 1, (g, p, log q): -1}``.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import stepgraph.kernels.loss.tokens  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import factor_of, is_cast, is_pure, is_zeros, only_user, upstream
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.passes.loss.head import DTYPES, RESHAPES, SAME, Head, place, readers, unfit

aten, ours = torch.ops.aten, torch.ops.stepgraph
#: z, p or log p of the logits that a softmax takes, the gradient that a node is, or a value of each row.
Symbol = tuple[str, fx.Node] | fx.Node
Terms = dict[tuple[Symbol, ...], float]

Z, P, LOG, GRADIENT = "z", "p", "log", "gradient"
SOFTMAXES = {aten._log_softmax.default: LOG, aten._softmax.default: P}
_MOST = 32  # terms examined


def times(one: Terms, other: Terms) -> Terms:
    """The product of two polynomials."""
    found: Terms = {}
    for (a, x), (b, y) in itertools.product(one.items(), other.items()):
        key = _key(*a, *b)
        found[key] = found.get(key, 0.0) + x * y
    return {key: value for key, value in found.items() if value}


def plus(one: Terms, other: Terms, factor: float = 1.0) -> Terms:
    """``one + factor * other``."""
    found = {key: one.get(key, 0.0) + factor * other.get(key, 0.0) for key in {**one, **other}}
    return {key: value for key, value in found.items() if value}


def _key(*symbols: Symbol) -> tuple[Symbol, ...]:
    return tuple(sorted(symbols, key=_order))


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
            self._known[node] = None if found is None or len(found) > _MOST else _logs(found)
        return self._known[node]

    def _read(self, node: fx.Node) -> Terms | None:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        if _is_of_row(node):
            return {(node,): 1.0}
        if any(user.target in SOFTMAXES or user.target is aten.logsumexp.default for user in node.users):
            return {((Z, node),): 1.0}
        if target in BACKWARDS or _is_scatter(node):
            return {((GRADIENT, node),): 1.0}
        if target in SOFTMAXES:
            over = node.args[1] in (-1, value.ndim - 1)
            return {((SOFTMAXES[target], node.args[0]),): 1.0} if over else None
        if target is aten.expand.default:
            return {(node.args[0],): 1.0} if _is_of_row(node.args[0]) else None
        if is_cast(node) or target in (*SAME, aten.clone.default) or (target in RESHAPES and _keeps_width(node)):
            return self(node.args[0])
        if node.kwargs or len(node.args) not in (1, 2):
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


def _logs(found: Terms) -> Terms:
    """``found`` with log p for z minus the log of its sum of exponentials."""
    for key, factor in list(found.items()):
        for symbol in key:
            if isinstance(symbol, fx.Node) and (z := _summed(symbol)) is not None:
                rest = list(key)
                rest.remove(symbol)
                if math.isclose(found.get(logit := _key(*rest, (Z, z)), 0.0), -factor):
                    found = plus({k: f for k, f in found.items() if k not in (key, logit)},
                                 {_key(*rest, (LOG, z)): -factor})  # fmt: skip
                    break
    return found


def _summed(node: fx.Node) -> fx.Node | None:
    """The logits whose exponentials ``node`` is the logarithm of a sum of, one for each row."""
    while node.target is aten.unsqueeze.default or node.target in RESHAPES or is_cast(node):
        node = node.args[0]
    return node.args[0] if node.target is aten.logsumexp.default and _sums_last(node) else None


def _is_of_row(node: fx.Node) -> bool:
    """Whether ``node`` is one value for all of a row."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and (value.ndim == 0 or value.shape[-1] == 1)


def _keeps_width(node: fx.Node) -> bool:
    return node.args[0].meta["val"].shape[-1:] == node.meta["val"].shape[-1:]


PRODUCTS = (aten.mm.default, aten.addmm.default)
BACKWARDS = {aten._log_softmax_backward_data.default: LOG, aten._softmax_backward_data.default: P}
_OF_ROWS = (aten.sum.dim_IntList, aten.mean.dim)
_SUMS = (*_OF_ROWS, aten.sum.default, aten.mean.default)
_IGNORE = -100  # a gather takes no negative label, so that none is left out

#: What is computed of each token: the label's log-probability, the logarithm of the sum of exponentials, the entropy
#: and the mean logit (as `token_stats` has them), the other head's entropy, and their divergences in both directions.
STATS = LABEL, SUM, OWN, MEAN = "log p", "log sum", "H(p)", "mean z"
OTHER, FORWARD, BACKWARD = "H(q)", "KL(p || q)", "KL(q || p)"
#: By what is summed, in the order of the module's formula: what it consists of.
_CONTENTS = {(0, 0): (OWN,), (0, 1): (OWN, FORWARD), (1, 1): (OTHER,), (1, 0): (OTHER, BACKWARD)}
#: Values of a row that multiply, and which factor above each multiplies.
Rows = dict[tuple[fx.Node, ...], dict[str, float]]


@dataclass
class Logits:
    """A product and the ``views`` from it to the softmaxes' input, which is ``scale`` times it."""

    head: Head
    views: list[fx.Node]
    scale: float


@dataclass
class TokenHead:
    """A head, and the nodes that read the probabilities of its tokens.

    ``softmaxes``: those of this head and of the ``other`` one. ``totals``: each sum over the vocabulary, with its
    summands. ``picked``: the values that ``gather`` reads. ``tops``: each row's argmax. ``first``: the first of these
    nodes. ``late``: nodes that compute labels after ``first``. ``back``: from ``last``, the gradient of the softmaxes'
    input, to the gradient of the product. ``slopes``: gradients of the results per token. ``written``: results that
    are overwritten in place.
    """

    softmaxes: set[fx.Node]
    own: Logits
    other: Logits | None
    shape: tuple[int, ...]
    gather: fx.Node | None
    late: list[fx.Node]
    picked: Rows
    totals: dict[fx.Node, Rows]
    tops: list[fx.Node]
    first: fx.Node
    written: set[fx.Node]
    last: fx.Node | None = None
    slopes: Rows = field(default_factory=dict)
    back: list[fx.Node] = field(default_factory=list)

    @property
    def head(self) -> Head:
        return self.own.head

    @property
    def rows(self) -> int:
        return math.prod(self.shape)

    @property
    def what(self) -> str:
        """For a report."""
        if self.other is not None:
            return "heads and divergences"
        return "head and log-probabilities" if self.gather is not None else "head and entropies"

    def needs(self, *names: str) -> bool:
        """Whether one of ``names`` has a part in a sum or a gradient."""
        found = (factors for rows in (self.picked, *self.totals.values(), self.slopes) for factors in rows.values())
        return any(name in factors for factors in found for name in names)

    def rewrite(self, bounds: list[tuple[int, int]]) -> None:
        """Put the rows of each of ``bounds`` in the place of all."""
        writer = _Writer(self, bounds)
        writer.forward()
        if self.last is not None:
            writer.backward()
        ends = [*self.head.dx, *self.head.dw, *self.head.db]
        erase_unread(*([self.gather] if self.gather else []), *self.totals, *self.tops, *ends)


def match(start: fx.Node, aliases: Aliases) -> TokenHead | str | None:
    """The head whose logits ``start``, a softmax or ``logsumexp``, takes, with another one that its probabilities meet;
    or why it is unchanged; or None where neither a label's log-probability nor a sum over the vocabulary is read."""
    read = Reading()
    softmaxes, gathers, totals, tops, lasts, others, inside = _region(start, read)
    losses = [user for user in others if user.target is aten.nll_loss_forward.default]
    if not gathers and (losses or not any(_is_sum(total, read) for total in totals)):
        return None
    taken = start.args[0].meta["val"]
    for node in softmaxes:
        value = node.meta["val"]
        if node.args[1] not in (-1, value.ndim - 1) or value.dtype not in DTYPES:
            return f"a softmax over dimension {node.args[1]} in {value.dtype}"
    if len(gathers) > 1:
        return f"{len(gathers)} gathers read it"
    if others:
        return f"{min(others).name} reads all log-probabilities"
    gather = (gathers or [None])[0]
    label = _single(read(gather.args[0])) if gather else None
    if gather and (label is None or label[0] == P):
        return f"{gather.name} reads another head, or probabilities"
    trained = dict.fromkeys(_itself(last.args[1]).args[0] for last in lasts)
    own = next(iter(trained), label[1] if label else start.args[0])
    inputs = dict.fromkeys([*(node.args[0] for node in softmaxes), own])
    if len(inputs) > 2 or len(trained) > 1:
        return f"{len(inputs)} heads meet in it, {len(trained)} of them with a gradient"
    if (label and label[1] is not own) or any(_itself(node.args[0]) is not own for node in tops):
        return f"{(gathers or tops)[0].name} reads another head, or probabilities"
    one = (*taken.shape[:-1], 1)
    if gather and (gather.args[1] % taken.ndim != len(one) - 1 or gather.args[2].meta["val"].shape != one):
        return "other than one label for each token"
    ends = [*lasts, *gathers, *totals, *tops]
    end = max(ends, key=aliases.position.get)
    first = min((n for n in ends if n not in lasts), key=aliases.position.get)
    sides = []
    for side in [own, *(z for z in inputs if z is not own)]:
        logits = _logits(side, inside, (lasts and end) or first)
        if isinstance(logits, str):
            return logits
        if aliases.position[logits.head.product] > aliases.position[first]:
            return f"{first.name} comes before the logits of the other head"
        if side.meta["val"].numel() != taken.numel() or side.meta["val"].shape[-1] != taken.shape[-1]:
            return f"{side.name} has other tokens"
        sides.append(logits)
    late = _late(gather.args[2], ends, first, aliases) if gather else []
    if late is None:
        return "its labels are computed after the entropy"
    if len(sides) == 2 and not math.isclose(sides[0].scale, sides[1].scale):
        return "the other head has another temperature"
    if tops and sides[0].scale < 0:
        return "its greatest logits are those of the least products"
    shape, columns = tuple(own.meta["val"].shape[:-1]), taken.shape[-1]
    written = {node for node in ends if aliases.writes.get(aliases.root(node))}
    picked = {(): _of_label(label[0], label[2])} if label else {}
    tokens = TokenHead({*softmaxes}, sides[0], (*sides, None)[1], shape, gather, late, picked, {}, tops, first, written)
    for total in totals:
        summed = total.target is aten.logsumexp.default
        rows = {(): {SUM: 1.0}} if summed else _contents(read(total.args[0]), own, shape, columns)
        tokens.totals[total] = rows
        if isinstance(rows, str) or {gather, *totals} & {node for key in rows for node in key}:
            return f"{total.name} sums what is not an entropy or divergence"
        if summed and total.args[0] is not own:
            return f"{total.name} reads another head"
    reason = _backward(tokens, lasts, own, read, columns)
    for logits in sides:
        reason = reason or unfit(logits.head, {logits.head.product}, aliases)
    return reason or tokens


def _single(terms: Terms | None) -> tuple[str, fx.Node, float] | None:
    """(z, p or log p, of which logits, the number that it is multiplied with) of a polynomial of one such term."""
    ((key, factor),) = terms.items() if terms and len(terms) == 1 else (((), 0.0),)
    return (*key[0], factor) if len(key) == 1 and isinstance(key[0], tuple) and key[0][0] in (Z, P, LOG) else None


def _of_label(kind: str, factor: float) -> dict[str, float]:
    """What the label's z or log p is, times ``factor``."""
    return {LABEL: factor} if kind == LOG else {LABEL: factor, SUM: factor}


def _region(start: fx.Node, read: Reading) -> tuple[list[fx.Node], ...]:
    """What is made of the logits that ``start`` takes and of the heads that they meet: (softmaxes, gathers, sums,
    where rows are greatest, the gradients of softmaxes, other readers, all readers but these)."""
    softmaxes, gathers, totals, tops, lasts, others = [], [], [], [], [], []
    queue, seen = [start.args[0]], {start.args[0]}
    while queue:
        node = queue.pop()
        met = [s[1] for key in read(node) or {} for s in key if isinstance(s, tuple) and s[0] != GRADIENT]
        for user in (*readers(node), *met):
            if user in seen:
                continue
            seen.add(user)
            terms = None if user.target in _SUMS else read(user)
            if user in met:
                queue.append(user)
            elif user.target in SOFTMAXES:
                softmaxes.append(user)
                queue.append(user)
            elif user.target is aten.gather.default:
                gathers.append(user)
            elif user.target in BACKWARDS:
                lasts.append(user)
            elif user.target in (*_SUMS, aten.logsumexp.default) and _sums_last(user):
                totals.append(user)
            elif user.target is aten.argmax.default and _sums_last(user):
                tops.append(user)
            elif terms and any(isinstance(s, tuple) and s[0] == GRADIENT for key in terms for s in key):
                pass  # read where it becomes the gradient of logits
            elif terms and any(isinstance(s, tuple) for key in terms for s in key):
                queue.append(user)
            else:
                others.append(user)
    return softmaxes, gathers, totals, tops, lasts, others, [node for node in seen if node not in others]


def _late(labels: fx.Node, ends: list[fx.Node], first: fx.Node, aliases: Aliases) -> list[fx.Node] | None:
    """What ``labels`` are made of after ``first``; None where that cannot come before, as where it reads ``ends``."""
    found, here = [], aliases.position[first]
    for node in sorted({labels, *upstream(labels, ends)}, key=aliases.position.get):
        at = aliases.position[node]
        if node in ends or (at > here and not is_pure(node)):
            return None
        if at > here:
            if any(aliases.written_between(source, here, at) for source in node.all_input_nodes):
                return None
            found.append(node)
    return found


def _is_scatter(node: fx.Node) -> bool:
    return node.target is aten.scatter_add.default and is_zeros(node.args[0])


def _itself(node: fx.Node) -> fx.Node:
    """``node`` without other names of it."""
    return _itself(node.args[0]) if node.target in SAME else node


def _sums_last(node: fx.Node) -> bool:
    """Whether ``node`` sums whole rows, or all of them."""
    last = node.args[0].meta["val"].ndim - 1
    if node.target in (aten.sum.default, aten.mean.default):
        return not node.kwargs
    return {*node.kwargs} <= {"dtype"} and len(node.args) > 1 and node.args[1] in (-1, last, [-1], [last])


def _is_sum(total: fx.Node, read: Reading) -> bool:
    return any(sum(isinstance(s, tuple) and s[0] == P for s in key) for key in read(total.args[0]) or {})


def _contents(terms: Terms | None, own: fx.Node, shape: tuple[int, ...], columns: int) -> Rows | str:
    """What the sum over the vocabulary of ``terms`` is, for the head of ``columns`` that takes ``own``."""
    found: Rows = {}
    for key, factor in (terms or {(): 0.0}).items():
        rows, symbols = _divided(key)
        kinds = dict(symbols)
        if not _fit(rows, shape):
            return "other terms"
        if symbols in ([(Z, own)], [(LOG, own)]):
            _add(found, rows, MEAN, factor * columns)
            if LOG in kinds:
                _add(found, rows, SUM, -factor * columns)
        elif len(symbols) == 2 and set(kinds) == {P, LOG}:
            for name in _CONTENTS[tuple(int(kinds[kind] is not own) for kind in (P, LOG))]:
                _add(found, rows, name, -factor)
        else:
            return "other terms"
    return _without_zeros(found)


def _add(found: Rows, rows: tuple[fx.Node, ...], name: str, factor: float) -> None:
    factors = found.setdefault(rows, {})
    factors[name] = factors.get(name, 0.0) + factor


def _without_zeros(found: Rows) -> Rows:
    return {rows: {n: f for n, f in factors.items() if abs(f) > 1e-12} for rows, factors in found.items()}


def _divided(key: tuple[Symbol, ...]) -> tuple[tuple[fx.Node, ...], list[tuple[str, fx.Node]]]:
    """The values of rows of a product, and the rest of it."""
    rest = [symbol for symbol in key if isinstance(symbol, tuple)]
    return tuple(symbol for symbol in key if isinstance(symbol, fx.Node)), rest


def _fit(rows: Iterable[fx.Node], shape: tuple[int, ...]) -> bool:
    """Whether each of ``rows`` is a number, or has one for each token."""
    return all(node.meta["val"].numel() in (1, math.prod(shape)) for node in rows)


def _logits(side: fx.Node, inside: list[fx.Node], end: fx.Node) -> Logits | str:
    """The product that makes ``side``, which those ``inside`` take."""
    node, views, scale = side, [], 1.0
    while True:
        if set(readers(node)).difference(inside) if node is side else len(node.users) > 1:
            return f"{node.name}, its logits, is read elsewhere"
        if node.target in PRODUCTS and not node.kwargs:
            return Logits(Head(node, end), views, scale)
        factor = factor_of(node)
        if not (factor or keeps_rows(node)):
            return "its logits are not a matrix product"
        views.insert(0, node)
        node, scale = node.args[0], scale * (factor or 1.0)


def _backward(tokens: TokenHead, lasts: list[fx.Node], own: fx.Node, read: Reading, columns: int) -> str | None:
    """Find the nodes from the gradients of the values read to those of the head; or why there is no rewrite."""
    product, gather = tokens.head.product, tokens.gather
    scatters = [user for user in gather.args[2].users if _is_scatter(user)] if gather else []
    if not (lasts or scatters):
        return None
    tokens.last = _meeting((lasts or scatters)[0], read)
    reached = read(tokens.last)
    if reached is None or {*lasts} - {s[1] for key in reached for s in key if isinstance(s, tuple)}:
        return "the gradients of its logits do not meet"
    reason = _slopes(tokens, reached, Z, own, read, columns)
    if reason:
        return reason
    tokens.slopes = _without_zeros(tokens.slopes)
    node, scale = tokens.last, 1.0
    while (user := only_user(node)) is not None and user.target not in (aten.t.default, *PRODUCTS):
        factor = factor_of(user)
        if not (factor or keeps_rows(user) or pads_rows(user)):
            return f"{user.name} reads the gradient of its logits"
        node, scale = user, scale * (factor or 1.0)
        tokens.back.append(node)
    if node.meta["val"].shape != product.meta["val"].shape or node.meta["val"].dtype != product.meta["val"].dtype:
        return "the gradient of its logits is not that of a product"
    if not math.isclose(scale, tokens.own.scale):
        return "the gradient of its logits has another factor"
    for user in node.users:
        if reason := place(user, tokens.head, {node}):
            return reason
    if tokens.head.between:
        return f"{tokens.head.between[0].name} reads the gradient of its logits"
    return None


def _meeting(node: fx.Node, read: Reading) -> fx.Node:
    """The last sum of the gradient ``node`` and of others."""
    top = node
    while (user := only_user(node)) is not None:
        if user.target is aten.add.Tensor and read(user) is not None:
            top = user
        elif not (user.target in RESHAPES and _keeps_width(user)):
            break
        node = user
    return top


def _slopes(tokens: TokenHead, terms: Terms, of: str, own: fx.Node, read: Reading, columns: int) -> str | None:
    """Read ``terms``, the gradient of z or, with LOG, of log p; or why that is not possible."""
    gather = tokens.gather
    for key, factor in terms.items():
        rows, symbols = _divided(key)
        kinds = dict(symbols)
        if not _fit(rows, tokens.shape):
            return "its gradient is not one of rows"
        if GRADIENT in kinds and _is_scatter(node := kinds[GRADIENT]) and len(symbols) == 1:
            if gather is None or node.args[1:3] != (gather.args[1], gather.args[2]):
                return "its gradient is of other labels"
            for name, more in _of_label(of, factor).items():
                _add(tokens.slopes, (*rows, node.args[3]), name, more)
        elif GRADIENT in kinds:
            inner = read(node.args[0]) if of == Z and len(symbols) == 1 and not rows and factor == 1 else None
            if inner is None:
                return f"{node.args[0].name}, its gradient, is of another loss"
            inner = times(inner, {((P, own),): 1.0}) if BACKWARDS[node.target] == P else inner
            if reason := _slopes(tokens, inner, LOG, own, read, columns):
                return reason
        elif not symbols:
            _add(tokens.slopes, rows, MEAN, factor * columns)
            if of == LOG:
                _add(tokens.slopes, rows, SUM, -factor * columns)
        elif symbols == [(P, own)]:
            if of == Z:
                _add(tokens.slopes, rows, SUM, factor)
        elif of == LOG and len(symbols) == 1 and P in kinds:
            _add(tokens.slopes, rows, BACKWARD, -factor)
        elif of == LOG and len(symbols) == 2 and LOG in kinds and kinds.get(P) is own:
            for name in _CONTENTS[0, int(kinds[LOG] is not own)]:
                _add(tokens.slopes, rows, name, -factor)
        else:
            return "its gradient is of another loss"
    return None


def keeps_rows(node: fx.Node) -> bool:
    """Whether ``node`` casts, or views whole rows."""
    if is_cast(node):
        return True
    before, after = (n.meta["val"] for n in (node.all_input_nodes[0], node)) if node.all_input_nodes else (None, None)
    if not isinstance(before, torch.Tensor) or before.ndim == 0 or before.shape[-1:] != after.shape[-1:]:
        return False
    sliced = node.target is aten.slice.Tensor and (node.args[1:2] or (0,))[0] % before.ndim != before.ndim - 1
    return node.target in (*RESHAPES, aten.clone.default) or sliced


def pads_rows(node: fx.Node) -> bool:
    return node.target is aten.slice_backward.default and node.args[2] % len(node.args[1]) != len(node.args[1]) - 1


class _Writer:
    """Writes a head in parts."""

    def __init__(self, tokens: TokenHead, bounds: list[tuple[int, int]]):
        self.tokens, self.head, self.bounds = tokens, tokens.head, bounds
        self.width = self.head.x.meta["val"].shape[1]
        self.lead = list(tokens.shape)
        self.kept: list[list[fx.Node]] = []  # the logits of both heads
        #: What operators gave for all rows, by their names: of the labels' head, of divergences from p and from q.
        self.stats: dict[str, list[fx.Node]] = {}

    def forward(self) -> None:
        tokens = self.tokens
        like = [n for n in (tokens.gather, tokens.first) if n is not None]
        for node in tokens.late:
            tokens.first.prepend(node)
        build = Builder(*like, before=tokens.first, mark=KEEP_EAGER)  # products, and what frees their memory
        self.x = {id(side): self._rows_of(build, side) for side in self._sides}
        self.labels = None
        if tokens.gather is not None:
            self.labels = self._rows(build, tokens.gather.args[2], [tokens.rows])
        elif tokens.needs(*STATS, OTHER):
            self.labels = self._full(build, _IGNORE, torch.int64)
        found: dict[str, list[list[fx.Node]]] = {}
        for part in self.bounds:
            logits = self._both(build, part)
            if len(self.bounds) == 1:
                self.kept.append(logits)
            labels = self.labels and self._part(build, self.labels, part)
            for top in tokens.tops[:1]:
                found.setdefault(Z, []).append([build(top.target, logits[0], 1)])
            for name, (target, *args) in self._operators(logits, labels).items():
                found.setdefault(name, []).append(build.parts(build(target, *args)))
        for name, parts in found.items():
            self.stats[name] = [build.cat(part) for part in zip(*parts, strict=True)]
        for top in tokens.tops:
            self._put(build, self.stats[Z][0], top)
        if tokens.gather is not None:
            self._put(build, self._weighted(build, tokens.picked), tokens.gather)
        for total, rows in tokens.totals.items():
            self._put(*self._total(total, rows), total)

    @property
    def _sides(self) -> list[Logits]:
        return [side for side in (self.tokens.own, self.tokens.other) if side is not None]

    def _full(self, build: Builder, value: float, dtype: torch.dtype) -> fx.Node:
        return build(aten.full.default, [self.tokens.rows], value, dtype=dtype, device=self.head.x.meta["val"].device)

    def _operators(self, logits: list[fx.Node], labels: fx.Node | None) -> dict[str, tuple[Any, ...]]:
        """The operators that are needed, each with its arguments."""
        tokens, scale = self.tokens, self.tokens.own.scale
        found: dict[str, tuple[Any, ...]] = {}
        if tokens.needs(*STATS):
            found[OWN] = ours.token_stats.default, logits[0], labels, scale, _IGNORE
        if tokens.needs(OTHER):
            found[OTHER] = ours.token_stats.default, logits[1], labels, scale, _IGNORE
        for name, order in ((FORWARD, 1), (BACKWARD, -1)):
            if tokens.needs(name):
                found[name] = ours.token_kl_stats.default, *logits[::order], scale
        return found

    def _value(self, name: str) -> fx.Node:
        if name in STATS:
            return self.stats[OWN][STATS.index(name)]
        return self.stats[name][2 if name == OTHER else 0]

    def _total(self, total: fx.Node, rows: Rows) -> tuple[Builder, fx.Node]:
        """The value of ``total``, and what continues there."""
        build = Builder(total, before=total)
        value = self._weighted(build, rows)
        if total.target in (aten.sum.default, aten.mean.default):
            value = build(aten.sum.default, value)
        if total.target in (aten.mean.default, aten.mean.dim):
            count = total.args[0].meta["val"].numel() // value.meta["val"].numel()
            value = build(aten.div.Scalar, value, count)
        return build, value

    def _weighted(self, build: Builder, rows: Rows, one: fx.Node | None = None) -> fx.Node:
        """The sum of tokens' values, or of ``one`` in place of each, with the factors in ``rows``, (rows,) fp32."""
        found = None
        for nodes, factors in rows.items():
            part = None
            for name, factor in factors.items():
                term = self._value(name) if one is None else one
                term = build(aten.mul.Scalar, term, factor) if factor != 1 else term
                part = term if part is None else build(aten.add.Tensor, part, term)
            for node in nodes if part is not None else ():
                part = build(aten.mul.Tensor, part, self._of_rows(build, node))
            found = part if found is None or part is None else build(aten.add.Tensor, found, part)
        return found

    def _of_rows(self, build: Builder, node: fx.Node) -> fx.Node:
        """``node``, a number or one for each token, as (rows,) or (1,) fp32."""
        return build.cast(self._rows(build, node, [node.meta["val"].numel()]), torch.float32)

    def _slope(self, build: Builder, name: str) -> fx.Node:
        """The gradient of ``name``, (rows,) fp32."""
        one = self._full(build, 1.0, torch.float32)
        rows = {nodes: {name: factors[name]} for nodes, factors in self.tokens.slopes.items() if name in factors}
        return self._weighted(build, rows, one) if rows else build(aten.zeros_like.default, one)

    def backward(self) -> None:
        tokens, head, last = self.tokens, self.head, self.tokens.last
        build = Builder(last, before=last, mark=KEEP_EAGER)
        wanted = {name for factors in tokens.slopes.values() for name in factors}
        slopes = {OWN: [self._slope(build, name) for name in STATS]} if wanted.intersection(STATS) else {}
        slopes |= {name: [self._slope(build, name)] for name in (FORWARD, BACKWARD) if name in wanted}
        weight = build(aten.t.default, head.weight) if head.dx else None
        dx, dw, db = [], None, []
        for part in self.bounds:
            both = self.kept[0] if self.kept else self._both(build, part, len(slopes) > (OWN in slopes))
            written = []
            for i, name in enumerate(slopes):
                logits = both[0] if i == len(slopes) - 1 else build(aten.clone.default, both[0])
                numbers = [self.labels, *self.stats[OWN][1:3]] if name == OWN else (
                    [*self.stats[name][1:][:: 1 if name == FORWARD else -1], self.stats[name][0]])  # fmt: skip
                numbers = [self._part(build, t, part) for t in (*numbers, *slopes[name])]
                if name == OWN:
                    build(ours.token_gradient_.default, logits, *numbers, tokens.own.scale, _IGNORE)
                else:
                    more = tokens.own.scale, name == FORWARD
                    build(ours.token_kl_gradient_.default, logits, both[1], *numbers, *more)
                written.append(logits)
            logits = written.pop()
            for one in written:
                build(aten.add_.Tensor, logits, one)
            if head.dx:
                dx.append(build(aten.mm.default, logits, weight))
            if head.dw:
                x = self._part(build, self.x[id(tokens.own)], part)
                dw = build.add_product(dw, build(aten.t.default, logits), x)
            if head.db:
                db.append(build(aten.sum.dim_IntList, logits, [0], True, dtype=torch.float32))
        if dx:
            whole = build.view(build.cat(dx), [*self.lead, self.width])
            whole = self._along(build, whole, tokens.back, self.width)
            self._replace(head.dx, build.view(whole, head.x.meta["val"].shape))
        self._replace(head.dw, dw)
        for node in head.db:
            value = node.meta["val"]
            node.replace_all_uses_with(build.cast(build.view(build.total(db), value.shape), value.dtype))

    def _rows_of(self, build: Builder, side: Logits) -> fx.Node:
        """The rows that ``side`` is computed of, one for each token."""
        width = side.head.x.meta["val"].shape[1]
        return self._rows(build, self._along(build, side.head.x, side.views, width), [self.tokens.rows, width])

    def _both(self, build: Builder, part: tuple[int, int], other: bool = True) -> list[fx.Node]:
        """The logits of a part, and with ``other`` those of the other head."""
        found = []
        for side in self._sides[: 2 if other else 1]:
            x, head = self._part(build, self.x[id(side)], part), side.head
            args = (x, head.weight) if head.bias is None else (head.bias, x, head.weight)
            found.append(build(head.product.target, *args, like=head.product))
        return found

    @staticmethod
    def _replace(nodes: list[fx.Node], new: fx.Node | None) -> None:
        for node in nodes:
            node.replace_all_uses_with(new)

    def _part(self, build: Builder, node: fx.Node, part: tuple[int, int]) -> fx.Node:
        return node if len(self.bounds) == 1 else build(aten.slice.Tensor, node, 0, *part)

    @staticmethod
    def _rows(build: Builder, node: fx.Node, shape: list[int]) -> fx.Node:
        return build.view(build.contiguous(node), shape)

    def _put(self, build: Builder, new: fx.Node, old: fx.Node) -> None:
        value = old.meta["val"]
        new = build.view(build(aten.clone.default, new) if old in self.tokens.written else new, value.shape)
        old.replace_all_uses_with(build.cast(new, value.dtype))

    def _along(self, build: Builder, node: fx.Node, views: list[fx.Node], width: int) -> fx.Node:
        """``node``, whose rows are those of logits, through the ``views`` that logits go through."""
        for view in views:
            if is_cast(view) or factor_of(view):
                continue
            shape = [*view.meta["val"].shape[:-1], width]
            if view.target is aten.slice.Tensor:
                node = build(view.target, node, *view.args[1:])
            elif view.target is aten.slice_backward.default:
                node = build(view.target, node, [*view.args[1][:-1], width], *view.args[2:])
            else:
                node = self._rows(build, node, shape)
        return node

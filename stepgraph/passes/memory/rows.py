"""Which operators compute each token by itself, so that some tokens can be processed separately.

A result's *rows* are its dimensions that count samples and tokens: (0, 1) in a hidden state (B, S, D), (0, 2) in
queries (B, H, S, D), one dimension for both in (B * S, D). Each operator has a rule that says where rows are in its
result when they are at given places of its arguments, or that its result is a sum over all rows, as the gradient of a
weight is.
Where nothing says where the rows of an argument are, their sizes do. A wrong guess may prevent tiling, but never gives
a wrong result: a region is computed in parts only if the rules of all its operators agree.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.facts import argument, is_pointwise

aten = torch.ops.aten
#: Tokens of a tile are a multiple of this, where there are enough: rows of a product's tile on a GPU.
_UNIT = 128


class Rows(NamedTuple):
    """Dimensions of samples and of tokens: one dimension where they are joined; ``sample`` is None where the batch is
    one sample. Of an argument that is broadcast, one may be missing."""

    sample: int | None
    token: int | None

    def moved(self, by: int) -> "Rows":
        return Rows(*(None if d is None else d + by for d in self))

    def through(self, places: Mapping[int, int]) -> "Rows":
        """Where dimensions move to ``places``."""
        return Rows(*(None if d is None else places[d] for d in self))

    @property
    def dims(self) -> set[int]:
        return {d for d in self if d is not None}


#: The result is a sum over all rows.
SUM = "sum"
Where = Rows | str


class Use(NamedTuple):
    """How an operator takes rows: where they are in its ``result`` (one of several for operators with several
    results), and in each tensor that it reads, None for what each part reads whole."""

    result: Where | tuple[Where, ...]
    reads: dict[fx.Node, Rows | None]


class Tile(NamedTuple):
    """Samples from ``first`` up to ``last``, and of these the tokens from ``begin`` up to ``end``."""

    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class Tokens:
    """A batch of ``samples`` with ``length`` tokens each."""

    samples: int
    length: int

    def tiles(self, count: int) -> list[Tile]:
        """About ``count`` parts, of several samples or of one: their rows follow one another where samples and tokens
        are one dimension."""
        if count <= self.samples:
            size = ceil(self.samples / count)
            return [Tile(a, min(a + size, self.samples), 0, self.length) for a in range(0, self.samples, size)]
        per_sample = ceil(count / self.samples)
        size = ceil(self.length / per_sample)
        size = ceil(size / _UNIT) * _UNIT if size >= _UNIT else size
        cuts = [(a, min(a + size, self.length)) for a in range(0, self.length, size)]
        return [Tile(i, i + 1, *cut) for i in range(self.samples) for cut in cuts]

    def flat(self, dim: int) -> Rows:
        """Rows in one dimension."""
        return Rows(dim if self.samples > 1 else None, dim)

    def are_joined(self, rows: Rows) -> bool:
        return self.samples > 1 and rows.sample == rows.token

    def find(self, shape: Sequence[int]) -> Rows | None:
        """Where rows are by the sizes of dimensions: the first place that they fit."""
        if self.samples == 1:
            return Rows(None, list(shape).index(self.length)) if self.length in shape else None
        for sample, size in enumerate(shape):
            if size == self.samples and self.length in shape[sample + 1 :]:
                return Rows(sample, list(shape).index(self.length, sample + 1))
        total = self.samples * self.length
        return self.flat(list(shape).index(total)) if total in shape else None

    def fit(self, shape: Sequence[int], rows: Rows) -> bool:
        """Whether dimensions ``rows`` of ``shape`` have the sizes of the batch, all of them."""
        if rows.token is None or (rows.sample is None) != (self.samples == 1):
            return False
        if self.are_joined(rows):
            return shape[rows.token] == self.samples * self.length
        return shape[rows.token] == self.length and (rows.sample is None or shape[rows.sample] == self.samples)

    def cut(self, tile: Tile, rows: Rows) -> list[tuple[int, int, int]]:
        """(dimension, first, last) of each slice that takes ``tile`` out of a tensor; whole dimensions are left out."""
        if self.are_joined(rows):
            first = tile.first * self.length + tile.begin
            last = (tile.last - 1) * self.length + tile.end
            return [(rows.token, first, last)]
        cuts = []
        if rows.sample is not None and tile.last - tile.first < self.samples:
            cuts.append((rows.sample, tile.first, tile.last))
        if rows.token is not None and tile.end - tile.begin < self.length:
            cuts.append((rows.token, tile.begin, tile.end))
        return cuts

    def sizes(self, tile: Tile, rows: Rows, shape: Sequence[int]) -> list[int]:
        """``shape`` of a tensor in ``tile``."""
        sizes = list(shape)
        for dim, first, last in self.cut(tile, rows):
            sizes[dim] = last - first
        return sizes

    def broadcast(self, shape: Sequence[int], rows: Rows, ndim: int) -> Rows | None:
        """Where the rows of a result with ``ndim`` dimensions are in an argument of ``shape``, which is broadcast."""
        own = rows.moved(len(shape) - ndim)
        found = Rows(*(d if d is not None and d >= 0 and shape[d] > 1 else None for d in own))
        return found if found.dims else None


_Known = Mapping[fx.Node, Where]
Rule = Callable[[fx.Node, _Known, Tokens], Use | None]


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of ``node``'s operator; None for operators that mix tokens, or that are unknown."""
    if node.target in _RULES:
        return _RULES[node.target]
    return _pointwise if is_pointwise(node) else None


def _shape(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def _rows(node: fx.Node, known: _Known, tokens: Tokens) -> Rows | None:
    """Where the rows of an argument are."""
    found = known.get(node)
    if isinstance(found, Rows):
        return found
    return tokens.find(_shape(node)) if found is None and isinstance(node.meta.get("val"), torch.Tensor) else None


def _pointwise(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    shape = _shape(node)
    ndim = len(shape)
    sources = list(dict.fromkeys(node.all_input_nodes))
    placed = [known[s].moved(ndim - len(_shape(s))) for s in sources if isinstance(known.get(s), Rows)]
    rows = placed[0] if placed else tokens.find(shape)
    if rows is None or not tokens.fit(shape, rows):
        return None
    return Use(rows, {source: tokens.broadcast(_shape(source), rows, ndim) for source in sources})


def _view(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    source = node.args[0]
    old, new = _shape(source), _shape(node)
    rows = _rows(source, known, tokens)
    if rows is None or not tokens.fit(old, rows):
        return None

    def at(before: int, size: int) -> int | None:
        """The dimension of ``size`` that has as many elements before it."""
        return next((d for d in range(len(new)) if new[d] == size and prod(new[:d]) == before), None)

    before = prod(old[: rows.token])
    if rows.sample is None:
        result = Rows(None, at(before, tokens.length))
    elif tokens.are_joined(rows):
        joined = at(before, tokens.samples * tokens.length)
        apart = Rows(at(before, tokens.samples), at(before * tokens.samples, tokens.length))
        result = tokens.flat(joined) if joined is not None else apart
    else:
        result = Rows(at(prod(old[: rows.sample]), tokens.samples), at(before, tokens.length))
        if None in result and before == prod(old[: rows.sample]) * tokens.samples:
            joined = at(prod(old[: rows.sample]), tokens.samples * tokens.length)
            result = Rows(joined, joined)
    return Use(result, {source: rows}) if tokens.fit(new, result) else None


def _places(node: fx.Node, ndim: int) -> dict[int, int]:
    """Where an operator that orders dimensions otherwise, adds or removes some, moves each that stays."""
    args, order = node.args, list(range(ndim))
    match node.target:
        case aten.t.default:
            order.reverse()
        case aten.transpose.int:
            a, b = (d % ndim for d in args[1:3])
            order[a], order[b] = b, a
        case aten.permute.default:
            order = [d % ndim for d in args[1]]
        case aten.unsqueeze.default:
            order.insert(args[1] % (ndim + 1), -1)
        case aten.select.int:
            order.remove(args[1] % ndim)
        case aten.squeeze.dim | aten.squeeze.dims:
            asked = [args[1]] if isinstance(args[1], int) else args[1]
            gone = {d % ndim for d in asked if _shape(args[0])[d] == 1}
            order = [d for d in order if d not in gone]
    return {dim: place for place, dim in enumerate(order)}


def _moves(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    source = node.args[0]
    rows = _rows(source, known, tokens)
    if rows is None:
        return None
    places = _places(node, len(_shape(source)))
    return Use(rows.through(places), {source: rows}) if rows.dims <= places.keys() else None


def _expand(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    source = node.args[0]
    rows = _rows(source, known, tokens)
    return rows and Use(rows.moved(len(_shape(node)) - len(_shape(source))), {source: rows})


def _item(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    found = known.get(node.args[0])
    return Use(found[node.args[1]], {}) if type(found) is tuple else None


def _along(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    """Operators along other dimensions than rows; sums and means may leave these out, sums also those of rows."""
    sources = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.all_input_nodes
    rows = next((known[s] for s in sources if isinstance(known.get(s), Rows)), None)
    rows = rows or _rows(sources[0], known, tokens)
    if rows is None:
        return None
    ndim = len(_shape(sources[0]))
    if any(len(_shape(s)) != ndim for s in sources):
        return None
    dims = argument(node, "dim")
    if dims is None and node.target in _SUMS:
        dims = list(range(ndim))
    if dims is None:
        return None
    dims = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
    reads = dict.fromkeys(sources, rows)
    if rows.dims & dims:
        return Use(SUM, reads) if rows.dims <= dims and node.target in _SUMS else None
    value = node.meta["val"]
    first = value[0] if isinstance(value, (list, tuple)) else value
    kept = [d for d in range(ndim) if d not in dims] if first.ndim < ndim else list(range(ndim))
    result = rows.through({d: i for i, d in enumerate(kept)})
    return Use((result,) * len(value) if isinstance(value, (list, tuple)) else result, reads)


def _select_backward(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    source, dim = node.args[0], node.args[2] % len(node.args[1])
    rows = _rows(source, known, tokens)
    return rows and Use(rows.through({d: d + (d >= dim) for d in range(len(node.args[1]) - 1)}), {source: rows})


def _product(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    """``x w`` has a row for each of x; ``dy^T x`` is a sum over rows."""
    *bias, a, b = node.args[:3]
    left, right = (known[n].token if isinstance(known.get(n), Rows) else None for n in (a, b))
    total = tokens.samples * tokens.length
    if left is None and right is None:
        left = 0 if _shape(a)[0] == total else None
        right = 0 if left is None and _shape(b)[0] == total else None
    if left == 0:
        also = {x: tokens.flat(0) if len(_shape(x)) == 2 and _shape(x)[0] == total else None for x in bias}
        return Use(tokens.flat(0), {a: tokens.flat(0), b: None} | also)
    if bias:
        return None
    if right == 1 and left is None:
        return Use(tokens.flat(1), {a: None, b: tokens.flat(1)})
    if (left == 1 or right == 0) and _shape(b)[0] == total:
        return Use(SUM, {a: tokens.flat(1), b: tokens.flat(0)})
    return None


def _norm(results: Sequence[bool], whole: Sequence[int]) -> Rule:
    """The rule of norms over the last dimensions: for each of the ``results``, whether it has rows; the arguments that
    are ``whole`` are weights."""

    def rule(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
        weights = [node.args[i] for i in whole if isinstance(node.args[i], fx.Node)]
        sources = [n for n in node.all_input_nodes if n not in weights]
        rows = next((known[s] for s in sources if isinstance(known.get(s), Rows)), None)
        rows = rows or _rows(sources[0], known, tokens)
        shape = argument(node, "normalized_shape")
        if rows is None or max(rows.dims) >= len(_shape(sources[0])) - len(shape):
            return None
        return Use(
            tuple(rows if has else SUM for has in results), dict.fromkeys(sources, rows) | dict.fromkeys(weights)
        )

    return rule


def _labels(node: fx.Node, known: _Known, tokens: Tokens) -> Use | None:
    """Losses of labels and their gradient, of (N, C) log-probabilities."""
    backward = node.target is aten.nll_loss_backward.default
    values, labels = node.args[1:3] if backward else node.args[:2]
    if argument(node, "weight") is not None or argument(node, "reduction") == 0 or len(_shape(values)) != 2:
        return None
    rows = tokens.flat(0)
    if not tokens.fit(_shape(values), rows):
        return None
    rest = dict.fromkeys(n for n in node.all_input_nodes if n not in (values, labels))
    return Use(rows if backward else (SUM, SUM), {values: rows, labels: rows} | rest)


_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_RULES: dict[object, Rule] = {
    operator.getitem: _item,
    aten.expand.default: _expand,
    aten.select_backward.default: _select_backward,
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.native_layer_norm.default: _norm((True, True, True), (2, 3)),
    aten.native_layer_norm_backward.default: _norm((True, False, False), (5, 6)),
    aten._fused_rms_norm.default: _norm((True, True), (2,)),
    aten._fused_rms_norm_backward.default: _norm((True, False), (4,)),
    aten.nll_loss_forward.default: _labels,
    aten.nll_loss_backward.default: _labels,
}
_RULES |= dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view)
_RULES |= dict.fromkeys(
    (
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.select.int),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default),
    ),
    _moves,
)
_RULES |= dict.fromkeys(
    (
        *(aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax_backward_data.default, aten.sum.dim_IntList, aten.sum.default, aten.mean.dim),
        *(aten.amax.default, aten.amin.default, aten.var_mean.correction, aten.linalg_vector_norm.default),
        *(aten.cumsum.default, aten.gather.default, aten.cat.default, aten.slice.Tensor, aten.slice_backward.default),
        *(aten.split.Tensor, aten.split_with_sizes.default),
    ),
    _along,
)
_RULES |= dict.fromkeys(
    (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.clone.default), _pointwise
)
#: Operators whose second argument is the shape of the result.
SIZED = {
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice_backward.default),
    aten.select_backward.default,
}

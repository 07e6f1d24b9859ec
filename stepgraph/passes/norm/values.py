"""Reads operators of a graph as polynomials in one tensor ``x``, its row statistics, weights and gradients.

See `algebra` for the polynomials. A node can be read if it is made of ``x``, of other tensors that were declared (such
as the incoming gradient), of weights and of numbers alone; any other node is foreign.
"""

import heapq
from collections.abc import Callable, Iterable

import torch
from torch import fx

from stepgraph.graph.aliases import is_written
from stepgraph.graph.facts import packet, stays_float
from stepgraph.passes.norm import algebra
from stepgraph.passes.norm.algebra import NotAlgebra, Polynomial

aten = torch.ops.aten

#: How far from known nodes an operand may lie. The longest way seen, in a hand-written layer norm's backward, is 6.
_REACH = 10

#: Rows are not shorter than this: so ``F.normalize`` guards its division, by 1e-12.
_NO_LENGTH = 1e-6

_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.contiguous}
_VIEWS = {aten.view, aten._unsafe_view, aten.expand, aten.unsqueeze, aten.squeeze, aten.reshape}


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that the node makes."""
    return node.meta["val"]


def is_copy(node: fx.Node) -> bool:
    """Whether the node casts, copies or passes on a floating-point tensor."""
    return packet(node) in _COPIES and stays_float(node)


def before_widening(node: fx.Node) -> fx.Node:
    """The tensor that copies, into wider dtypes or the same, started from."""
    while is_copy(node) and torch.promote_types(value_of(node.args[0]).dtype, value_of(node).dtype) == (
        value_of(node).dtype
    ):
        node = node.args[0]
    return node


class Values:
    """Polynomials of the nodes around the tensor ``x``, shape (..., N).

    ``known``: node -> polynomial. ``sums``: node -> (polynomial, the foreign tensor of the shape of x that is added to
    it), as the gradient that comes in from the residual stream is. ``under``: what is under the norm's root. ``least``:
    what the root was found to be clamped to; 0 for nothing.

    How far is read does not grow with the graph, however many norms follow each other: a root of anything else than
    ``under`` is foreign, and a sum with a foreign tensor is read only into copies and further sums of known terms.
    """

    def __init__(self, x: fx.Node, copies: Iterable[fx.Node] = ()):
        self.x = x
        self.shape = value_of(x).shape
        self.known: dict[fx.Node, Polynomial] = {node: algebra.factor("full", x) for node in (x, *copies)}
        self.sums: dict[fx.Node, tuple[Polynomial, fx.Node]] = {}
        self.under: Polynomial | None = None
        self.least = 0.0
        self._without_last: set[fx.Node] = set()
        self._foreign: dict[fx.Node, int] = {}  # and how far was looked
        self._reads_sums = False

    def with_gradient(self, dy: fx.Node) -> "Values":
        """The same, knowing ``dy`` too, and reading sums with foreign tensors."""
        more = Values(self.x)
        more.known = {**self.known, dy: algebra.factor("full", dy)}
        more.under = self.under
        more._without_last = set(self._without_last)
        more._reads_sums = True
        return more

    def reads(self, node: fx.Node) -> bool:
        """Whether the node has been read."""
        return node in self.known or node in self.sums

    def is_full(self, node: fx.Node) -> bool:
        """Whether the node makes one tensor of the shape of x."""
        made = node.meta.get("val")
        return isinstance(made, torch.Tensor) and made.shape == self.shape and made.is_floating_point()

    def is_column(self, node: fx.Node) -> bool:
        """Whether the node makes a tensor that has the same row, or rows for heads, all over x."""
        made = node.meta.get("val")
        if not isinstance(made, torch.Tensor) or not made.is_floating_point() or made.shape == self.shape:
            return False
        shape = list(made.shape)
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        # Rows for heads, but not what a batch of one sequence leaves of any tensor, as the (T, N) of a matrix product.
        heads = self.shape[:-2].numel() > 1 and shape == list(self.shape[-2:])
        return heads or shape == list(self.shape[-1:])

    def get(self, node: fx.Node, reach: int = _REACH) -> Polynomial | None:
        """The polynomial of ``node``, or None if it is foreign."""
        if node in self.known:
            return self.known[node]
        if reach <= self._foreign.get(node, 0):
            return None
        result = None
        if self.is_column(node) and not self._is_transparent_column(node):
            result = algebra.factor("column", node)
        elif packet(node) in _RULES:
            try:
                result = _RULES[packet(node)](self, node, reach - 1)
            except NotAlgebra:
                result = None
        # What writes into all of a node, which nothing else reads, has a rule of its own.
        if result is None or not self._aligned(node) or (len(node.users) > 1 and is_written(node)):
            self._foreign[node] = reach
            return None
        self.known[node] = result
        return result

    def spread(self, starts: Iterable[fx.Node]) -> list[fx.Node]:
        """Read whatever is made of ``starts`` and of nothing foreign; the nodes read, in order."""
        heap, queued, read = [], set(), []

        def push(node: fx.Node) -> None:
            for user in node.users:
                if user not in queued and packet(user) in _RULES:
                    queued.add(user)
                    heapq.heappush(heap, user)

        for start in starts:
            push(start)
        while heap:
            node = heapq.heappop(heap)
            if self.get(node) is None and not (self._reads_sums and self._read_sum(node)):
                continue
            read.append(node)
            push(node)
        return read

    def _read_sum(self, node: fx.Node) -> bool:
        """Read ``known + foreign``, additions of known terms to such a sum, and its copies."""
        if not self.is_full(node):
            return False
        if is_copy(node) or packet(node) in _VIEWS:
            if node.args[0] in self.sums:
                self.sums[node] = self.sums[node.args[0]]
        elif packet(node) is aten.add and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
            for mine, other in (node.args, reversed(node.args)):
                if not (isinstance(mine, fx.Node) and isinstance(other, fx.Node)) or mine in self._without_last:
                    continue
                if mine in self.known and other in self.sums:
                    polynomial, foreign = self.sums[other]
                    self.sums[node] = algebra.add(polynomial, self.known[mine]), foreign
                elif mine in self.known and not self.reads(other) and self.is_full(mine) and self.is_full(other):
                    self.sums[node] = self.known[mine], before_widening(other)
        return node in self.sums

    def _is_transparent_column(self, node: fx.Node) -> bool:
        """Whether to look behind a column: at what was cast, at a weight plus a number, and at sums over rows."""
        kind = packet(node)
        if kind in _VIEWS or kind is aten.sum or is_copy(node):
            return True
        number = any(isinstance(a, (int, float)) for a in node.args)
        return kind in (aten.add, aten.rsub, aten.sub) and number

    def _aligned(self, node: fx.Node) -> bool:
        """Whether the node's dimensions are those of x, each whole or of length 1, counted from the last."""
        made = value_of(node).shape
        like = self.shape[:-1] if node in self._without_last else self.shape
        if len(made) > len(like) or (node in self._without_last and len(made) != len(like)):
            return False
        return all(a in (1, b) for a, b in zip(reversed(made), reversed(like), strict=False))

    # What the rules use.

    def operand(self, argument: object, reach: int) -> Polynomial:
        """The polynomial of an argument. Raises `NotAlgebra` for a foreign one."""
        if isinstance(argument, (int, float)):
            return algebra.constant(argument)
        result = self.get(argument, reach) if isinstance(argument, fx.Node) else None
        if result is None:
            raise NotAlgebra
        return result

    def power(self, a: Polynomial, exponent: float) -> Polynomial:
        """``a ** exponent``, with roots of what is under this norm's root alone. Raises `NotAlgebra` for others."""
        is_root = exponent != int(exponent) or (exponent < 0 and not (exponent == -1 and len(a) == 1))
        is_number = a.keys() == {algebra.ONE}
        if is_root and not is_number and self.under is not None and not algebra.same(a, self.under):
            raise NotAlgebra
        return algebra.power(a, exponent)

    def elementwise(self, node: fx.Node, arguments: Iterable[object], reach: int) -> list[Polynomial]:
        """The polynomials of arguments that are combined element by element."""
        arguments = list(arguments)
        result = [self.operand(a, reach) for a in arguments]
        tensors = [a for a in arguments if isinstance(a, fx.Node)]
        short = [a in self._without_last for a in tensors]
        if any(short):
            if not all(short):
                raise NotAlgebra
            self._without_last.add(node)
        return result

    def same_elements(self, node: fx.Node, reach: int) -> Polynomial:
        """The polynomial behind a view that adds, drops or expands dimensions of length 1."""
        source = node.args[0]
        result = self.operand(source, reach)
        made, read = value_of(node).shape, value_of(source).shape
        if packet(node) is not aten.expand and [d for d in made if d != 1] != [d for d in read if d != 1]:
            raise NotAlgebra
        if source in self._without_last:
            if len(made) == len(self.shape) - 1:
                self._without_last.add(node)
            elif len(made) != len(self.shape) or made[-1] != 1:
                raise NotAlgebra
        elif len(made) == len(self.shape) - 1 and result and algebra.is_per_row(result):
            self._without_last.add(node)
        return result

    def reduced(self, node: fx.Node, reach: int, *, mean: bool) -> Polynomial:
        """The polynomial of a mean or sum over the row, or of a sum over rows."""
        source, dims, keep = node.args[0], *_dims_and_keep(node)
        result = self.operand(source, reach)
        read = value_of(source).shape
        if source in self._without_last or len(read) != len(self.shape):
            raise NotAlgebra
        dims = tuple(sorted(d % len(read) for d in dims)) or tuple(range(len(read)))
        last = len(read) - 1
        if dims == (last,):
            if read[-1] == 1:
                total = result
            else:
                total = algebra.row_mean(result)
                total = total if mean else algebra.multiply(total, algebra.constant(read[-1]))
            if not keep:
                self._without_last.add(node)
            return total
        if mean or last in dims or read != self.shape:
            raise NotAlgebra
        return algebra.column_sum(result, self.longer_than_one(dims))

    def longer_than_one(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The dimensions of x over which there is something to sum."""
        return tuple(d for d in dims if self.shape[d] > 1)


def _dims_and_keep(node: fx.Node) -> tuple[list[int], bool]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return dims, bool(keep)


Rule = Callable[[Values, fx.Node, int], Polynomial]


def _add(values: Values, node: fx.Node, reach: int, sign: float = 1.0) -> Polynomial:
    a, b = values.elementwise(node, node.args[:2], reach)
    return algebra.add(a, b, sign * (node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)))


def _sub(values: Values, node: fx.Node, reach: int) -> Polynomial:
    return _add(values, node, reach, -1.0)


def _rsub(values: Values, node: fx.Node, reach: int) -> Polynomial:
    a, b = values.elementwise(node, node.args[:2], reach)
    return algebra.add(b, a, -1.0 * (node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)))


def _mul(values: Values, node: fx.Node, reach: int) -> Polynomial:
    return algebra.multiply(*values.elementwise(node, node.args[:2], reach))


def _div(values: Values, node: fx.Node, reach: int) -> Polynomial:
    if node.kwargs.get("rounding_mode") is not None:
        raise NotAlgebra
    a, b = values.elementwise(node, node.args[:2], reach)
    return algebra.multiply(a, values.power(b, -1.0))


def _length(values: Values, node: fx.Node, reach: int) -> Polynomial:
    """The length of each row: the root of the sum of its squares."""
    order, dims, keep = (*node.args[1:], *(2, None, False)[len(node.args) - 1 :])
    shape = value_of(node.args[0]).shape
    if order != 2 or dims not in ([-1], [len(shape) - 1]) or node.kwargs or shape != values.shape:
        raise NotAlgebra
    squares = algebra.row_mean(algebra.power(values.operand(node.args[0], reach), 2))
    if not keep:
        values._without_last.add(node)
    return values.power(algebra.multiply(squares, algebra.constant(shape[-1])), 0.5)


def _root(values: Values, node: fx.Node, reach: int) -> Polynomial:
    """The norm's root, which an operator compares with a number."""
    (root,) = values.elementwise(node, node.args[:1], reach)
    if values.under is None or not algebra.same(root, values.power(values.under, 0.5)) or len(node.args) != 2:
        raise NotAlgebra
    return root


def _clamped(values: Values, node: fx.Node, reach: int) -> Polynomial:
    """The root where it is no less than a number that no row is near to."""
    root, least = _root(values, node, reach), node.args[1]
    if node.kwargs or not isinstance(least, float) or not 0 < least <= _NO_LENGTH:
        raise NotAlgebra
    values.least = max(values.least, least)
    return root


def _mask(by: float, most: float) -> Rule:
    """Whether the root is not 0, or is: true or false, as ``by`` is 1 or 0, except for rows that no model has."""

    def rule(values: Values, node: fx.Node, reach: int) -> Polynomial:
        _root(values, node, reach)
        if not 0 <= node.args[1] <= most:
            raise NotAlgebra
        return algebra.constant(by)

    return rule


def _masked(value: int, mask: int, zero: int, kept: float) -> Rule:
    """The argument ``value`` where ``mask`` is as it is in all rows, and 0 elsewhere."""

    def rule(values: Values, node: fx.Node, reach: int) -> Polynomial:
        a, condition = values.elementwise(node, (node.args[value], node.args[mask]), reach)
        other = node.args[zero]
        if isinstance(other, fx.Node) and other.target is aten.scalar_tensor.default:
            other = other.args[0]
        if isinstance(other, fx.Node) or other != 0 or condition != algebra.constant(kept):
            raise NotAlgebra
        return a

    return rule


def _power(exponent: float | None = None) -> Rule:
    def rule(values: Values, node: fx.Node, reach: int) -> Polynomial:
        (a,) = values.elementwise(node, node.args[:1], reach)
        by = node.args[1] if exponent is None else exponent
        if not isinstance(by, (int, float)):
            raise NotAlgebra
        return values.power(a, by)

    return rule


def _neg(values: Values, node: fx.Node, reach: int) -> Polynomial:
    return algebra.multiply(algebra.constant(-1), *values.elementwise(node, node.args[:1], reach))


def _copy(values: Values, node: fx.Node, reach: int) -> Polynomial:
    if not is_copy(node):
        raise NotAlgebra
    return values.elementwise(node, node.args[:1], reach)[0]


def _in_place(rule: Rule) -> Rule:
    """The result of writing into a tensor that nothing else reads is what the operator without the write gives."""

    def in_place(values: Values, node: fx.Node, reach: int) -> Polynomial:
        written = node.args[0]
        if written.op != "call_function" or len(written.users) != 1 or packet(written) in (*_VIEWS, *_COPIES):
            raise NotAlgebra
        return rule(values, node, reach)

    return in_place


def _variance(values: Values, node: fx.Node, reach: int) -> Polynomial:
    """``mean((a - mean(a)) ** 2)``, times N / (N - correction)."""
    source, dims, keep = node.args[0], *_dims_and_keep(node)
    read, correction = value_of(source).shape, node.kwargs.get("correction", 1)
    if not dims or [d % len(read) for d in dims] != [len(read) - 1] or source in values._without_last:
        raise NotAlgebra
    correction = 1 if correction is None else correction
    if read != values.shape or read[-1] <= correction:
        raise NotAlgebra
    a = values.operand(source, reach)
    squares, mean = algebra.row_mean(algebra.power(a, 2)), algebra.row_mean(a)
    if not keep:
        values._without_last.add(node)
    biased = algebra.add(squares, algebra.power(mean, 2), -1.0)
    return algebra.multiply(biased, algebra.constant(read[-1] / (read[-1] - correction)))


_RULES: dict[object, Rule] = {
    aten.add: _add,
    aten.add_: _in_place(_add),
    aten.sub: _sub,
    aten.sub_: _in_place(_sub),
    aten.rsub: _rsub,
    aten.mul: _mul,
    aten.mul_: _in_place(_mul),
    aten.div: _div,
    aten.div_: _in_place(_div),
    aten.pow: _power(),
    aten.square: _power(2.0),
    aten.sqrt: _power(0.5),
    aten.rsqrt: _power(-0.5),
    aten.reciprocal: _power(-1.0),
    aten.linalg_vector_norm: _length,
    aten.clamp_min: _clamped,
    aten.clamp: _clamped,
    aten.ge: _mask(1.0, _NO_LENGTH),
    aten.gt: _mask(1.0, _NO_LENGTH),  # in gradients of torch 2.15
    aten.eq: _mask(0.0, 0.0),
    aten.where: _masked(1, 0, 2, 1.0),
    aten.masked_fill: _masked(0, 1, 2, 0.0),
    aten.masked_fill_: _in_place(_masked(0, 1, 2, 0.0)),
    aten.neg: _neg,
    aten.mean: lambda values, node, reach: values.reduced(node, reach, mean=True),
    aten.sum: lambda values, node, reach: values.reduced(node, reach, mean=False),
    aten.var: _variance,
    **dict.fromkeys(_COPIES, _copy),
    **dict.fromkeys(_VIEWS, lambda values, node, reach: values.same_elements(node, reach)),
}

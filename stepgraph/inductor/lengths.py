"""Pieces that serve every length of a batch: two pieces that differ in numbers alone become one with a symbolic length.

A piece's numbers are its inputs' sizes and strides and the integers among its operators' arguments. Where the numbers
of two lengths differ, each number becomes a multiple of the length, of its square, or a multiple and a constant. The
piece so written is compiled with a symbolic length (as Dynamo compiles dynamic shapes). It serves a third length if the
expressions give exactly that piece's numbers, and if all holds there that the compiler assumed: nothing is guessed.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import compat


class Number(NamedTuple):
    """``factor * length ** power + constant``; ``power`` is 0, 1 or 2."""

    factor: int
    power: int
    constant: int

    def at(self, length: Any) -> Any:
        """Its value; ``length`` may be symbolic."""
        return self.constant if not self.power else self.factor * length**self.power + self.constant


def skeleton(piece: fx.GraphModule) -> tuple | None:
    """A key that two pieces share if they differ in their `numbers` alone; None for one that calls other graphs."""
    names = {node: f"%{i}" for i, node in enumerate(piece.graph.nodes)}
    found: list[Any] = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            found.append((value.dtype, value.device, value.ndim, aligned))
        elif node.op == "get_attr":
            return None
        else:
            form = _map((node.args, node.kwargs), lambda n: int, lambda other: (type(other), repr(other)), names.get)
            found.append((node.op, node.target, form))
    return tuple(found)


def numbers(piece: fx.GraphModule) -> list[int]:
    """Sizes and strides of the inputs, then the integers among the arguments, in the graph's order."""
    found: list[int] = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            found += [*node.meta["val"].shape, *node.meta["val"].stride()]
        else:
            _map((node.args, node.kwargs), found.append)
    return found


def _map(
    value: Any,
    number: Callable[[int], Any],
    other: Callable[[Any], Any] = lambda value: value,
    node: Callable[[fx.Node], Any] = lambda node: node,
) -> Any:
    """Nested arguments with each integer, anything else and each node replaced, in a fixed order."""
    if isinstance(value, fx.Node):
        return node(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map(item, number, other, node) for item in value)
    if isinstance(value, dict):
        return tuple((key, _map(item, number, other, node)) for key, item in value.items())
    return number(value) if type(value) is int else other(value)


def generalize(first: Sequence[int], second: Sequence[int]) -> tuple[list[Number], int] | None:
    """(the numbers in terms of a length, the position where the length itself is one), or None if there is no such."""
    pairs = list(zip(first, second, strict=True))
    differing = sorted({(p, q) for p, q in pairs if p != q and min(p, q) > 1})
    # Rather the length that most of the others are multiples of; of such, the least.
    for length in sorted(differing, key=lambda length: -sum(_whole(length, pair) is not None for pair in differing)):
        found = [_number(length, pair) for pair in pairs]
        if None not in found:
            return found, pairs.index(length)
    return None


def _number(length: tuple[int, int], pair: tuple[int, int]) -> Number | None:
    (a, b), (p, q) = length, pair
    if p == q:
        return Number(0, 0, p)
    whole = _whole(length, pair)
    if whole is not None:
        return whole
    factor, rest = divmod(q - p, b - a)
    return None if rest else Number(factor, 1, p - factor * a)


def _whole(length: tuple[int, int], pair: tuple[int, int]) -> Number | None:
    """The pair as a multiple of the length or of its square."""
    for power in (1, 2):
        a, b = (n**power for n in length)
        factor = pair[0] // a
        if factor > 0 and (factor * a, factor * b) == pair:
            return Number(factor, power, 0)
    return None


class ForLengths:
    """A piece compiled with a symbolic length, ``hint`` of which is the one at hand."""

    def __init__(self, piece: fx.GraphModule, found: list[Number], where: int, hint: int, config: dict[str, Any]):
        self.numbers, self.where = found, where
        self.length = compat.SymbolicLength(hint)
        with self.length.mode:
            graph, inputs = self._symbolic(piece)
            self.function = compat.inductor_compile(graph, inputs, config, self.length.mode)

    def at(self, found: Sequence[int]) -> int | None:
        """The length of the piece with these numbers if this one computes it, else None."""
        length = found[self.where]
        same = all(mine.at(length) == theirs for mine, theirs in zip(self.numbers, found, strict=True))
        return length if same and self.length.may_be(length) else None

    def _symbolic(self, piece: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
        """The piece with the length as its first input, and its inputs: symbolic sizes, no values."""
        graph, found = fx.Graph(), iter(self.numbers)
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[Any] = [self.length.symbol]
        length = graph.placeholder("length")
        length.meta["val"] = self.length.symbol
        placeholders = piece.graph.find_nodes(op="placeholder")
        for node in placeholders:
            value = node.meta["val"]
            sizes, strides = ([next(found).at(self.length.symbol) for _ in range(value.ndim)] for _ in range(2))
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
            inputs.append(copies[node].meta["val"])
        written = _Written(graph, length)
        for node in piece.graph.nodes:
            if node not in placeholders and node.op != "output":
                args, kwargs = _replaced((node.args, node.kwargs), lambda: written(next(found)), copies)
                copies[node] = graph.call_function(node.target, args, kwargs)
        results = piece.graph.output_node().args[0]
        results = (results,) if isinstance(results, fx.Node) else results
        compat.keep_mode(graph.output(tuple(copies[node] for node in results)), self.length.mode)
        return fx.GraphModule({}, graph), inputs


class _Written:
    """Numbers as arguments of ``graph``'s nodes: constants, or nodes that compute them from ``length``."""

    def __init__(self, graph: fx.Graph, length: fx.Node):
        self.graph, self.nodes = graph, {Number(1, 1, 0): length}

    def __call__(self, number: Number) -> Any:
        if not number.power:
            return number.constant
        if number not in self.nodes:
            self.nodes[number] = self._computed(number)
        return self.nodes[number]

    def _computed(self, number: Number) -> fx.Node:
        call = self.graph.call_function
        if number.constant:
            return call(operator.add, (self(number._replace(constant=0)), number.constant))
        if number.factor != 1:
            return call(operator.mul, (self(Number(1, number.power, 0)), number.factor))
        length = self(Number(1, 1, 0))
        return call(operator.mul, (length, length))


def _replaced(value: Any, number: Callable[[], Any], copies: dict[fx.Node, fx.Node]) -> Any:
    """Nested arguments with the copies of nodes and with numbers for integers, in the order of `numbers`."""
    if isinstance(value, fx.Node):
        return copies[value]
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, number, copies) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, number, copies) for key, item in value.items()}
    return number() if type(value) is int else value

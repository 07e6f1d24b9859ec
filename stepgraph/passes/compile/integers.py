"""Positions that Inductor would compute without the bounds of their types.

It follows what is made of ``arange`` and constants as expressions, in which a cast changes only the type:
``arange(8).mul(200).to(uint8)`` holds 400 where eager has 144, ``arange(8, dtype=int32) * 10**9`` does not wrap, and
``arange(2**24, 2**24 + 8).float()`` is not rounded (torch 2.11 to 2.13, under ``torch.compile`` too). A kernel on a GPU
computes them in 32 bits, int64 too. `beyond` finds by intervals what its type cannot hold; eager computes it, and
Inductor reads the result from memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.graph.facts import argument, is_view, packet

aten = torch.ops.aten

_CONSTANTS = {
    **dict.fromkeys((aten.full, aten.full_like, aten.new_full), "fill_value"),
    aten.scalar_tensor: "s",
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
}
#: Operators whose results hold what their first argument holds.
_MOVES = (aten._to_copy, aten.clone, aten.flip, aten.roll, aten.repeat, aten.index, aten.index_select, aten.gather)
_DIVIDING = (aten.floor_divide, aten.div, aten.remainder, aten.fmod)


class Interval(NamedTuple):
    """Whole numbers from ``low`` to ``high``; ``moves``: whether positions are among what they are made of."""

    low: int
    high: int
    moves: bool


def _by_ends(function: Callable[[int, int], int]) -> Callable[[Interval, Interval], list[int]]:
    """What ``function``, monotonic in each argument, gives at the ends of two intervals."""
    return lambda x, y: [function(a, b) for a in x[:2] for b in y[:2]]


def _powers(x: Interval, y: Interval) -> list[int]:
    largest = max(abs(x.low), abs(x.high), 1) ** min(max(y.high, 0), 1 << 8)
    return [0 if x.low >= 0 else -largest, largest]


def _quotients(x: Interval, y: Interval) -> list[int]:
    """Quotient and rest are no larger. A kernel on a CPU divides by the positions past the end too, one may be 0."""
    return [-(1 << 64), 1 << 64] if y.moves else [min(x.low, -x.high, y.low, 0), max(x.high, -x.low, y.high, 0)]


_BINARY = {
    aten.add: _by_ends(lambda a, b: a + b),
    aten.sub: _by_ends(lambda a, b: a - b),
    aten.rsub: _by_ends(lambda a, b: b - a),
    aten.mul: _by_ends(lambda a, b: a * b),
    **dict.fromkeys((aten.minimum, aten.clamp_max), _by_ends(min)),
    **dict.fromkeys((aten.maximum, aten.clamp_min), _by_ends(max)),
    **dict.fromkeys(_DIVIDING, _quotients),
    **dict.fromkeys((aten.__lshift__, aten.bitwise_left_shift), _by_ends(lambda a, b: a << min(max(b, 0), 64))),
    aten.pow: _powers,
}


def beyond(graph: fx.Graph) -> list[fx.Node]:
    """Operators on positions whose results their types, or 32 bits, cannot hold, with the ones on positions that they
    read."""
    known: dict[fx.Node, Interval] = {}
    left: list[fx.Node] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.numel():
            continue
        found = _interval(node, known)
        if found is None:
            continue
        known[node] = found
        pending = [node] if found.moves and not _holds(value.dtype, found) else []
        while pending:
            one = pending.pop()
            if known.pop(one, Interval(0, 0, False)).moves:
                left.append(one)
                pending += one.all_input_nodes
    return left


def _holds(dtype: torch.dtype, found: Interval) -> bool:
    """Whether all of an interval are numbers of the type, and integers of 32 bits."""
    if dtype is torch.bool or dtype.is_complex:
        low, high = 0, 1
    elif dtype.is_floating_point:
        high = round(2 / torch.finfo(dtype).eps)
        low = -high
    else:
        info = torch.iinfo(torch.int32 if dtype is torch.int64 else dtype)
        low, high = info.min, info.max
    return low <= found.low and found.high <= high


def _interval(node: fx.Node, known: dict[fx.Node, Interval]) -> Interval | None:
    """What ``node`` holds if its type does not limit it; None if that does not follow from positions and constants."""
    kind, value = packet(node), node.meta["val"]
    if kind is aten.arange:
        start, step = argument(node, "start") or 0, argument(node, "step") or 1
        ends = _operand(start, known), _operand(start + (value.numel() - 1) * step, known)
        return None if None in ends else Interval(min(ends)[0], max(ends)[0], True)
    if kind in _CONSTANTS:
        name = _CONSTANTS[kind]
        return _operand(argument(node, name) if isinstance(name, str) else name, known)
    x, *others = [_operand(one, known) for one in node.args] or [None]
    if x is None:
        return None
    if is_view(node) or kind in _MOVES:
        return x
    if kind in (aten.sum, aten.cumsum, aten.neg, aten.abs):  # a cumulative sum of constants is made of positions
        size = 1 if kind in (aten.neg, aten.abs) else node.args[0].meta["val"].numel()
        largest = max(abs(x.low), abs(x.high)) * size
        low = 0 if kind is aten.abs or (x.low >= 0 and kind is not aten.neg) else -largest
        return Interval(low, largest, x.moves or kind is aten.cumsum)
    if kind is aten.clamp:
        return x._replace(
            high=max(x.high, *(y.high for y in others if y)), low=min(x.low, *(y.low for y in others if y))
        )
    y = others[0] if others else None
    if kind not in _BINARY or y is None or (kind in _DIVIDING and value.dtype.is_floating_point):
        return None
    if kind is aten.pow and isinstance(node.args[1], fx.Node):  # by a number it is products
        return None
    if (alpha := node.kwargs.get("alpha", 1)) != 1:
        if (scale := _operand(alpha, known)) is None:
            return None
        x, y = (_scaled(x, scale), y) if kind is aten.rsub else (x, _scaled(y, scale))
    ends = _BINARY[kind](x, y)
    return Interval(min(ends), max(ends), x.moves or y.moves)


def _scaled(x: Interval, scale: Interval) -> Interval:
    ends = sorted((x.low * scale.low, x.high * scale.low))
    return Interval(*ends, x.moves)


def _operand(given: Any, known: dict[fx.Node, Interval]) -> Interval | None:
    """The interval of an argument, a node or a whole number."""
    if isinstance(given, fx.Node):
        return known.get(given)
    whole = isinstance(given, (int, float)) and abs(given) < 1 << 63 and given == int(given)
    return Interval(int(given), int(given), False) if whole else None

"""Integers of few bits that Inductor computes with as with whole numbers of any size.

It follows what is made of positions (``arange``) and constants as expressions, in which a cast changes the type alone:
``arange(8).mul(200).to(uint8) * w`` reads 400 where eager reads 144, and ``arange(8).bool() * w`` the positions (torch
2.11 to 2.13, under ``torch.compile`` too). Bitwise operators and comparisons it computes. Before -> after:
``cast(x, bool)`` -> ``ne(x, 0)``, ``cast(x, uint8)`` -> ``cast(x & 255, uint8)``, ``cast(x, int8)`` ->
``cast(((x + 128) & 255) - 128, int8)``, and ``arange(dtype=int8)`` -> that of ``arange(dtype=int64)``, for integers
``x``.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)


def write_narrow_integers(graph: fx.Graph) -> None:
    """Write casts to integers of less than 32 bits, and positions of such types, so that Inductor computes them."""
    for target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.meta["val"].dtype in _NARROW:
                with graph.inserting_before(node):
                    wide = _call(graph, target, *node.args, **(node.kwargs | {"dtype": torch.int64}), like=node)
                    _replace(node, _cast(graph, wide, node.meta["val"].dtype, {}))
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        given, dtype = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        whole = not (given.is_floating_point or given.is_complex or given in (dtype, torch.bool))
        if whole and dtype in _NARROW:
            with graph.inserting_before(node):
                _replace(node, _cast(graph, node.args[0], dtype, node.kwargs))


def _cast(graph: fx.Graph, operand: fx.Node, dtype: torch.dtype, kwargs: dict[str, Any]) -> fx.Node:
    if dtype is torch.bool:
        made = _call(graph, aten.ne.Scalar, operand, 0)
    else:
        if operand.meta["val"].dtype is not torch.int64:
            operand = _call(graph, aten._to_copy.default, operand, dtype=torch.int64)
        bits = torch.iinfo(dtype).bits
        half = 2 ** (bits - 1) if dtype.is_signed else 0
        made = _call(graph, aten.add.Tensor, operand, half) if half else operand
        made = _call(graph, aten.bitwise_and.Scalar, made, 2**bits - 1)
        made = _call(graph, aten.sub.Tensor, made, half) if half else made
    return _call(graph, aten._to_copy.default, made, **(kwargs | {"dtype": dtype}))


def _replace(node: fx.Node, made: fx.Node) -> None:
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    mode = (like or args[0]).meta["val"].fake_mode
    with mode, torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node

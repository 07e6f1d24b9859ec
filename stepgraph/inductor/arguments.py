"""Keyword arguments that Inductor's patterns ignore, written as operators of their own.

A pattern matches a call whatever keyword arguments it has besides those that the pattern names: ``add(x, a @ b,
alpha=2)`` becomes ``addmm(x, a, b)`` (pytorch #167313, #196577). Before -> after: ``add(x, y, alpha=a)`` -> ``add(x,
mul(y, a))``, likewise ``sub``; ``sum(x, dtype=d)`` -> ``sum(cast(x, d))``, likewise ``cumsum``. Inductor makes the same
arithmetic of both forms. A test compares `WRITTEN` with the patterns of the installed torch. ``maximum(p, q)`` of
truth values, which Inductor cannot compare, -> ``logical_or(p, q)``; ``minimum(p, q)`` -> ``logical_and(p, q)``.
"""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: The argument of each operator that becomes an operator, and the place of what that works on.
WRITTEN = {
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_), ("alpha", 1)),
    aten.rsub: ("alpha", 0),
    **dict.fromkeys((aten.sum, aten.cumsum), ("dtype", 0)),
}
_OF_TRUTH = {aten.maximum.default: aten.logical_or.default, aten.minimum.default: aten.logical_and.default}


def write_arguments(graph: fx.Graph) -> None:
    """Write the arguments that `WRITTEN` names as operators, in all of ``graph``."""
    for node in list(graph.nodes):
        if node.target in _OF_TRUTH and node.meta["val"].dtype is torch.bool:
            node.target = _OF_TRUTH[node.target]
        name, place = WRITTEN.get(getattr(node.target, "overloadpacket", None), (None, 0))
        given = node.kwargs.get(name)
        if given is None:
            continue
        operand = node.args[place]
        dtype = given if name == "dtype" else node.meta["val"].dtype
        with graph.inserting_before(node):
            if isinstance(operand, fx.Node) and _cast_first(operand.meta["val"], name, dtype):
                operand = _call(graph, aten._to_copy.default, operand, dtype=dtype)
            if name == "alpha" and given != 1:
                scaled = isinstance(operand, fx.Node)
                operand = _call(graph, aten.mul.Tensor, operand, given) if scaled else operand * given
        node.update_arg(place, operand)
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
        if name == "dtype" and not (given.is_floating_point or given.is_complex or given is torch.int64):
            with graph.inserting_after(node):  # sums of integers are int64, unless asked for
                narrowed = _call(graph, aten._to_copy.default, node, dtype=given)
            node.replace_all_uses_with(narrowed, delete_user_cb=lambda user, made=narrowed: user is not made)
            node.meta["val"] = node.meta["val"].to(torch.int64)


def _cast_first(value: torch.Tensor, name: str, dtype: torch.dtype) -> bool:
    """Whether the operator casts ``value`` to ``dtype`` before the arithmetic. In a sum of two, a scalar tensor keeps
    its dtype, and so does what is added in place to a tensor of lower precision."""
    widens = value.ndim > 0 and torch.promote_types(value.dtype, dtype) == dtype
    return value.dtype != dtype and (name == "dtype" or widens)


def _call(graph: fx.Graph, target: Any, operand: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, (operand, *args), kwargs)
    value = operand.meta["val"]
    with value.fake_mode, torch.no_grad():
        node.meta["val"] = target(value, *args, **kwargs)
    return node

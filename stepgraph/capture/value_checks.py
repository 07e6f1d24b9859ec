"""Checks of values that eager makes on the host before it computes, as nodes that raise when the step runs.

For the tensors of a trace torch leaves these out: that classes of ``one_hot`` are below their number, and that ``q`` of
``quantile`` is in [0, 1]. Those of ``torch.distributions`` ask for a value, which a trace has not.
"""

import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from stepgraph import compat
from stepgraph.capture.batch_reads import packet
from stepgraph.graph.facts import is_view

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
#: Functions of theirs that raise where a truth value is false. Others decide by one how to compute.
_CHECKS = ("__init__", "_validate_sample", "check", "_mvdigamma")
#: Operators that give positions along a dimension.
_POSITIONS = ("topk", "sort", "argsort", "max", "min", "kthvalue", "mode", "median", "argmax", "argmin", "multinomial")
#: Operators besides views whose elements are those of their first argument.
_SAME = ("_to_copy", "clone", "index", "gather", "index_select")


def check_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_literal: Callable) -> bool | None:
    """Record what eager checks in a call of ``func``; the answer to a question for a truth value that such a check
    asks. ``is_literal``: whether the values of a tensor follow from literals, whose checks are eager's."""
    if func not in _CHECKED or not compat.is_tracing():
        return None
    if func is Tensor.__bool__ and not is_literal(args[0]):
        frame = compat.outside_function_modes(sys._getframe(2))
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS) and frame.f_code.co_name in _CHECKS:
            compat.assert_all(args[0], _message(frame))
            return True
    elif func is nn.functional.one_hot:
        _check_classes(*args, **kwargs)
    elif func is not Tensor.__bool__:
        q = kwargs["q"] if "q" in kwargs else args[1]
        if isinstance(q, Tensor) and q.device.type == "cpu":
            compat.assert_all(q.ge(0).logical_and_(q.le(1)), "quantile() q values must be in the range [0, 1]")
    return None


_CHECKED = {Tensor.__bool__, nn.functional.one_hot}
_CHECKED |= {torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile}


def _message(frame: FrameType) -> str:
    param, of = map(frame.f_locals.get, ("param", "self"))
    return f"{param or 'a value'} of {type(of).__name__} is outside what torch.distributions allows"


def _check_classes(x: Tensor, num_classes: int = -1) -> None:
    if compat.is_traceable_wrapper_subclass(x) or x.numel() == 0:
        return
    bound = _bound(compat.node_of_trace(x))
    if bound is None:
        compat.assert_all(x >= 0, "Class values must be non-negative.")
    if num_classes > 0 and not (bound is not None and bound <= num_classes):
        compat.assert_all(x < num_classes, "Class values must be smaller than num_classes.")


def _bound(node: fx.Node | None) -> int | None:
    """A number above all elements of ``node``, if they are positions along a dimension; else None."""
    while node is not None and node.all_input_nodes and (is_view(node) or packet(node) in _SAME or _is_second(node)):
        node = node.all_input_nodes[0]
    if node is None or packet(node) not in _POSITIONS or len(node.target._schema.arguments) == 1:  # max() is a value
        return None
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    sizes, dim = node.all_input_nodes[0].meta["val"].shape, given.get("dim", -1)
    return sizes.numel() if dim is None else sizes[dim] if sizes else 1


def _is_second(node: fx.Node) -> bool:
    """Whether ``node`` is the second result of an operator."""
    return packet(node) == "" and node.op == "call_function" and node.args[1:] == (1,)

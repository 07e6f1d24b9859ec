"""A norm found in a graph, and the neighbouring casts and sums that one operator can compute with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph.graph.facts import only_user, packet
from stepgraph.kernels.norm.spec import DTYPES
from stepgraph.passes.norm.values import before_widening, is_copy, value_of

aten = torch.ops.aten


@dataclass
class Gradient:
    """The backward of one norm. ``dy``, ``x``: what it reads, x perhaps a recomputed copy. ``dh``: the gradient from
    the residual stream that is added to that of x, or None. ``dx``, ``dw``, ``db``: the nodes that hold its results,
    None for what nobody needs."""

    dy: fx.Node
    x: fx.Node
    dh: fx.Node | None = None
    dx: fx.Node | None = None
    dw: fx.Node | None = None
    db: fx.Node | None = None

    def results(self) -> list[fx.Node]:
        """The nodes that hold results."""
        return [n for n in (self.dx, self.dw, self.db) if n is not None]


@dataclass
class Found:
    """One norm of a graph, over the last dimension of ``x``.

    ``form``: how it is written, for people. ``kind``: ``rms`` or ``layer``. ``weight``, ``bias``: nodes or None;
    ``offset`` is added to the weight. ``outputs``: nodes that hold y: several if it is computed again for backward.
    ``nodes``: all that a rewrite makes unnecessary, results included, in the order of the graph. ``original``: the
    norm of which this is a recomputed copy, if any; a copy that only serves its backward may have no outputs.
    """

    form: str
    kind: str
    eps: float
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    offset: float
    outputs: list[fx.Node]
    root: fx.Node
    gradient: Gradient | None = None
    nodes: list[fx.Node] = field(default_factory=list)
    original: "Found | None" = None


@dataclass
class Refused:
    """Something that looks like a norm. ``why`` it is left alone."""

    root: fx.Node
    why: str


def _is_narrowing(node: fx.Node) -> bool:
    """Whether the node rounds a tensor to a narrower dtype that our operators can write."""
    made, read = value_of(node).dtype, value_of(node.args[0]).dtype
    return made != read and torch.promote_types(made, read) == read and made in DTYPES


def _reshaped(dw: fx.Node | None) -> fx.Node | None:
    """What alone reads ``dw``, in another shape or dtype."""
    while dw is not None and (user := only_user(dw)):
        if not is_copy(user) and packet(user) not in (aten.view, aten._unsafe_view, aten.squeeze):
            break
        dw = user
    return dw


def complete(norms: Sequence[Found]) -> None:
    """Extend norms to what alone reads their results: casts, and the sum with the residual stream's gradient.

    No node goes into two norms.
    """
    taken = {node for found in norms for node in found.nodes}
    for found in norms:
        gradient = found.gradient
        found.outputs = [_rounded(y, taken) for y in found.outputs]
        if gradient:
            if gradient.dx is not None:
                gradient.dx = _rounded(gradient.dx, taken)
                total = _with_stream(gradient.dx, taken) if gradient.dh is None else None
                if total is not None:
                    gradient.dx, gradient.dh = _rounded(total[0], taken), total[1]
            gradient.dw = _reshaped(gradient.dw)
            gradient.db = _reshaped(gradient.db)
        results = [*found.outputs, *(gradient.results() if gradient else ())]
        found.nodes = sorted({*found.nodes, *results})
        taken.update(found.nodes)


def _rounded(node: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """The cast to a narrower dtype that alone reads ``node``, if there is one: the operator rounds once."""
    while (user := only_user(node)) and user not in taken and is_copy(user) and _is_narrowing(user):
        node = user
    return node


def _with_stream(dx: fx.Node, taken: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """``(sum, dh)`` where ``sum`` alone reads ``dx``, perhaps cast to a wider dtype."""
    user = only_user(dx)
    if user is not None and is_copy(user):
        dx, user = user, only_user(user)
    if user is None or user in taken:
        return None
    dh = _added(user, dx)
    return None if dh is None else (user, dh)


def _added(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """The other tensor of the sum ``node``, of the same shape as ``one``, before casts to wider dtypes."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    others = [a for a in node.args if a is not one]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    other = others[0].meta.get("val")
    if not isinstance(other, torch.Tensor) or not other.is_floating_point():
        return None
    if other.shape != value_of(one).shape or value_of(node).shape != other.shape:
        return None
    return before_widening(others[0])


def added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``(branch, residual)`` where ``node`` is their sum: two tensors of its shape, the residual of its dtype."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    made = value_of(node)
    sides = [a for a in node.args if isinstance(a, fx.Node) and value_of(a).shape == made.shape]
    if len(sides) != 2 or not all(value_of(a).is_floating_point() for a in sides):
        return None
    residual, branch = sides
    if value_of(residual).dtype != made.dtype:
        residual, branch = branch, residual
    return (before_widening(branch), residual) if value_of(residual).dtype == made.dtype else None

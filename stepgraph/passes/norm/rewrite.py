"""Replaces the norms that were found with our operators.

Before -> after, for a norm with all its neighbours:

    h = x + residual; y = norm(h)        ->  y, h, rstd = stepgraph::norm(x, residual)
    dx = backward of norm(dy); dh + dx   ->  dx = stepgraph::norm_backward(dy, h, rstd, dh)

A tensor whose dimensions lie in memory in another order than the operators write keeps that order, because later views
rely on it: the operators then run on the dimensions in that order.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import only_user, other_input, packet
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.norm import operators  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.kernels.norm.spec import DTYPES
from stepgraph.passes.norm.values import before_widening, is_copy, value_of

aten, ours = torch.ops.aten, torch.ops.stepgraph


@dataclass
class Gradient:
    """The backward of one norm. ``dy``, ``x``: what it reads, x perhaps a recomputed copy. ``dh``: the gradient from
    the residual stream that is added to that of x, or None. ``dx``, ``dw``, ``db``: the nodes that hold its results,
    None if unused."""

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
    ``offset`` is added to the weight. ``outputs``: nodes that hold y: several if it is recomputed for backward.
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
    """Extend norms to the only readers of their results: casts, and the sum with the residual stream's gradient.

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
    """The cast to a narrower dtype that is the only reader of ``node``, if there is one: the operator rounds once."""
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
    other = other_input(node, one)
    value = other and other.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    if value.shape != value_of(one).shape or value_of(node).shape != value.shape:
        return None
    return before_widening(other)


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


def unsupported(found: Found, aliases: Aliases) -> str | None:
    """Why our operators cannot take the place of this norm, or None. Asked before anything is rewritten."""
    x, gradient = value_of(found.x), found.gradient
    tensors = [found.x, found.weight, found.bias, *found.outputs]
    if gradient:
        tensors += [gradient.dy, gradient.dh, gradient.dx]
    allowed = (*DTYPES, torch.float64) if x.dtype == torch.float64 and x.device.type == "cpu" else DTYPES
    for node in tensors:
        if node is not None and value_of(node).dtype not in allowed:
            return f"{node.name} has dtype {value_of(node).dtype}"
    if not found.outputs and not found.original:
        return "nothing reads its output"
    if x.stride(-1) != 1:
        return "its rows are not contiguous"
    if found.bias is not None and (found.weight is None or _form(found.bias) != _form(found.weight)):
        return "its bias is not of the form of its weight"
    per_head = found.weight is not None and _form(found.weight)[0] != x.shape[-1:]
    written = [n for n in (*found.outputs, gradient and gradient.dx) if n is not None]
    if any(value_of(n).stride(-1) != 1 for n in written):
        return "the rows that it writes are not contiguous"
    if per_head and any(order_of(n) != list(range(x.ndim)) for n in written):
        return "it has a weight per head and writes its heads in another order"
    first, last = aliases.position[found.nodes[0]], aliases.position[found.nodes[-1]]
    for node in (found.x, found.weight, found.bias, gradient and gradient.x, gradient and gradient.dy):
        if node is not None and aliases.written_between(node, first, last):
            return f"{node.name} is overwritten before its backward is done"
    if gradient:
        users = [user for node in gradient.results() for user in node.users]
        reads = [n for n in (gradient.dy, gradient.dh, gradient.x) if n is not None]
        if users and min(users) <= max(reads):
            return f"{min(users).name} reads a result before {max(reads).name} is known"
    return None


def _written_before(found: Found, aliases: Aliases) -> bool:
    """Whether the rows, weight or bias of ``found`` are written after the rows were made and before they are read."""
    if not found.outputs:
        return False
    first, last = aliases.position[found.x], aliases.position[found.outputs[0]]
    return any(aliases.written_between(n, first, last) for n in (found.x, found.weight, found.bias) if n is not None)


def _form(weight: fx.Node) -> tuple[torch.Size, torch.dtype]:
    """Shape without leading ones, and dtype."""
    shape = value_of(weight).shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape, value_of(weight).dtype


def order_of(node: fx.Node) -> list[int]:
    """The dimensions of a dense tensor from the slowest in memory to the last."""
    made = value_of(node)
    order = sorted(range(made.ndim - 1), key=lambda d: -made.stride(d)) + [made.ndim - 1]
    moved = made.permute(order)
    return order if moved.is_contiguous() and not made.is_contiguous() else list(range(made.ndim))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def permuted(build: Builder, node: fx.Node | None, order: Sequence[int], like: fx.Node | None = None) -> fx.Node | None:
    """``node`` with its dimensions in ``order``; for one dimension less, those before the last."""
    if node is None:
        return None
    return build.permute(node, [d for d in order if d < value_of(node).ndim], like)


class Rewriter:
    """Replaces ``norms``, in graph order, with operators."""

    def __init__(self, step: StepGraph, norms: Sequence[Found], aliases: Aliases):
        self.graph = step.graph
        #: Roots of norms whose rows or weights are written between the sum that makes the rows and the norm.
        self.written_to = {f.root for f in norms if _written_before(f, aliases)}
        #: Roots whose statistics the backward of a recomputed copy reads.
        self.read_later = {f.original.root for f in norms if f.original and not f.outputs}
        self._moved: dict[fx.Node, fx.Node] = {}
        self.statistics: dict[fx.Node, tuple[fx.Node | None, fx.Node]] = {}  # root -> (mean, rstd)

    # Nodes

    def now(self, node: fx.Node | None) -> fx.Node | None:
        """What replaces ``node`` of the original graph."""
        while node in self._moved:
            node = self._moved[node]
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Every reader of ``old`` reads ``new``; what then is unread goes at the end, in `erase` and `sweep`."""
        old.replace_all_uses_with(new)
        self._moved[old] = new

    def replace_shaped(self, build: Builder, old: fx.Node, new: fx.Node) -> None:
        """The same, with ``new`` in shape and dtype of ``old``."""
        viewed = build.view(new, value_of(old).shape, like=old)
        self.replace(old, build.cast(viewed, value_of(old).dtype, like=old))

    def weight(self, build: Builder, node: fx.Node | None) -> fx.Node | None:
        """The weight in the shape that the operators take."""
        node = self.now(node)
        return None if node is None else build.view(node, _form(node)[0])

    def erase(self, found: Found) -> None:
        """Take out what nothing reads any more of the norm, what it writes in place included."""
        for node in reversed(found.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def sweep(self) -> None:
        """Take out the casts and sums that only erased nodes read."""
        erase_unread(*self.graph.nodes)

    # Norms

    def rewrite(self, found: Found) -> tuple[bool, bool]:
        """Replace ``found`` with the operators; whether they include the residual add and the residual gradient."""
        residual = self._forward(found)
        if found.gradient and found.gradient.results():
            self._backward(found)
        self.erase(found)
        return residual, bool(found.gradient and found.gradient.dh)

    def _forward(self, found: Found) -> bool:
        if not found.outputs:  # recomputed only for backward: the first statistics are kept instead
            self.statistics[found.root] = self.statistics[found.original.root]
            return False
        first, *again = found.outputs
        branches = self._residual(found, order_of(first))
        if branches is None:
            self._norm(found, first, self.now(found.x), None)
        else:
            self._norm(found, first, *branches)
        for y in again:
            self._norm(found, y, self.now(found.x), None)
        return branches is not None

    def _residual(self, found: Found, order: list[int]) -> tuple[fx.Node, fx.Node] | None:
        """``(branch, residual)`` whose sum is normalized, if the operator can add them."""
        sum_ = self.now(found.x)
        sides = added(sum_)
        weights = [n for n in (self.now(found.weight), self.now(found.bias)) if n is not None]
        if sides is None or any(n >= sum_ for n in weights) or order_of(sum_) != order:
            return None
        if found.root in self.written_to:
            return None
        if any(value_of(n).stride(-1) != 1 or value_of(n).dtype not in DTYPES for n in sides):
            return None
        return sides

    def _norm(self, found: Found, y: fx.Node, x: fx.Node, residual: fx.Node | None) -> None:
        """Norm of ``x``, plus the ``residual`` if given: its sum then replaces ``found.x``."""
        place = y if residual is None else self.now(found.x)
        build, order = Builder(y, before=place), order_of(y)
        weight, bias = self.weight(build, found.weight), self.weight(build, found.bias)
        node = build(
            ours.norm.default, permuted(build, x, order), weight, bias, permuted(build, residual, order),
            value_of(y).dtype, found.kind, found.eps, found.offset, residual is not None,
        )  # fmt: skip
        wanted, back = self._wanted(found, y, residual), inverse(order)
        results = {i: permuted(build, build(operator.getitem, node, i), back) for i in wanted}
        self.replace(y, results[0])
        if residual is not None:
            self.replace(place, results[1])
        if found.root not in self.statistics and 3 in results:
            self.statistics[found.root] = results.get(2), results[3]

    def _wanted(self, found: Found, y: fx.Node, residual: fx.Node | None) -> list[int]:
        """Which results of the operator somebody reads: y, h, mean, rstd."""
        wanted = [0] if residual is None else [0, 1]
        if y is found.outputs[0] and (found.gradient or found.root in self.read_later):
            wanted += [2, 3] if found.kind == "layer" else [3]
        return wanted

    def _backward(self, found: Found) -> None:
        gradient = found.gradient
        order = order_of(gradient.dx or gradient.dy)
        mean, rstd = self.statistics[found.root]
        dy, x, dh = self.now(gradient.dy), self.now(gradient.x), self.now(gradient.dh)
        reads = [n for n in (dy, x, mean, rstd, dh) if n is not None]
        build = Builder(gradient.results()[0], before=_place_after(max(reads), gradient.results()))
        dy, x, mean, rstd, dh = (permuted(build, n, order) for n in (dy, x, mean, rstd, dh))
        dtype = value_of(gradient.dx).dtype if gradient.dx else value_of(found.x).dtype
        parts = (gradient.dx, gradient.dw, gradient.db)
        node = build(
            ours.norm_backward.default, dy, x, self.weight(build, found.weight), mean, rstd, dh,
            dtype, found.kind, found.eps, found.offset, dtype, *(n is not None for n in parts),
        )  # fmt: skip
        for i, old in enumerate(parts):
            if old is not None:
                part = build(operator.getitem, node, i, like=old)
                part = permuted(build, part, inverse(order), like=old) if i == 0 else part
                self.replace_shaped(build, old, part)


def _place_after(node: fx.Node, results: list[fx.Node]) -> fx.Node:
    """The node before which to compute what reads ``node``: the first of ``results`` after it."""
    return min((n for n in results if n > node), default=node.next)

"""Finds norms in a step graph, forward, and the backward that belongs to it. Names and types of modules play no part.

A fused operator (``native_layer_norm``, ``_fused_rms_norm``) is known by its name, and its backward by reading its
statistics. A composite norm is proved: what follows from its root ``rsqrt(mean(x^2) + eps)``, however it is written, is
read as polynomials (see `values`). Only a node that equals ``xhat * (weight + offset) + bias`` is an output, only one
that equals a derivative of the norm is a gradient. If anything else reads an intermediate result, the norm stays.
"""

import torch
from torch import fx

from stepgraph.graph.facts import argument, getitem_users, packet
from stepgraph.graph.provenance import phase_of
from stepgraph.kernels.norm.spec import default_eps
from stepgraph.passes.norm import algebra
from stepgraph.passes.norm.algebra import Polynomial
from stepgraph.passes.norm.rewrite import Found, Gradient, Refused, complete
from stepgraph.passes.norm.values import Values, before_widening, is_copy, value_of

aten = torch.ops.aten

ROOTS = (aten.rsqrt, aten.sqrt, aten.pow, aten.linalg_vector_norm)


def normalized(root: fx.Node) -> fx.Node | None:
    """The tensor whose mean square is under the ``root``, before casts; None if there is nothing of the kind."""
    if packet(root) is aten.pow and root.args[1] not in (0.5, -0.5):
        return None
    if packet(root) is aten.linalg_vector_norm:
        return _with_rows(root.args[0])
    queue = [root.args[0]]
    for node in queue:
        if len(queue) > 16 or not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        if packet(node) in (aten.mean, aten.sum, aten.var):
            source = _squared(node)
            if source is not None:
                return source
        else:
            queue += node.all_input_nodes
    return None


def _squared(reduction: fx.Node) -> fx.Node | None:
    """What is squared in ``mean(x^2)``, ``mean((x - mean(x))^2)`` or ``var(x)``."""
    node = reduction.args[0]
    if packet(reduction) is not aten.var:
        if packet(node) not in (aten.pow, aten.square, aten.mul) or (
            packet(node) is aten.mul and node.args[0] is not node.args[1]
        ):
            return None
        node = node.args[0]
        if packet(node) is aten.sub:
            node = node.args[0]
    return _with_rows(node)


def _with_rows(node: fx.Node) -> fx.Node | None:
    """``node`` before casts, if its rows have more than one element."""
    node = before_widening(node)
    return node if value_of(node).ndim and value_of(node).shape[-1] > 1 else None


class Composite:
    """One root and what follows from it."""

    def __init__(self, root: fx.Node, x: fx.Node, copies: list[fx.Node], original: Found | None):
        self.root, self.x, self.copies, self.original = root, x, copies, original
        self.values = Values(x, copies)

    def match(self) -> Found | Refused:
        """The norm, with its backward where it has one, or why it is none."""
        found = self._forward()
        if isinstance(found, Refused):
            return found
        values, (inside, strangers) = self.values, self._reach(self.values, found.outputs)
        if any(phase_of(reader) == "backward" for reader in strangers):
            values = self._backward(found)
            if values is None:
                return Refused(self.root, f"{strangers[0].name}, which reads its results, is not its backward")
            results = [*found.outputs, *found.gradient.results()]
            inside, strangers = self._reach(values, results)
        if strangers:
            return Refused(self.root, f"what is inside it is read by {strangers[0].name}")
        kept = {self.x, *self.copies, found.weight, found.bias}
        found.nodes = [*inside, *found.outputs, *(found.gradient.results() if found.gradient else ())]
        gone = set(found.nodes)
        read = sorted([*values.known, *values.sums], reverse=True)
        for node in read:  # what only they read: squares, casts, the mean
            if node.op == "call_function" and node not in kept and node.users and set(node.users) <= gone:
                gone.add(node)
        found.nodes = list(gone)
        return found

    def _reach(self, values: Values, results: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """``(inside, strangers)``: what depends on the statistics otherwise than through ``results``, and who reads it
        besides."""
        inside, strangers, queue = {self.root: None}, [], [self.root]
        while queue:
            for user in queue.pop().users:
                if user in results or user in inside:
                    continue
                if values.reads(user):
                    inside[user] = None
                    queue.append(user)
                else:
                    strangers.append(user)
        return list(inside), sorted(strangers)

    # Forward

    def _forward(self) -> Found | Refused:
        length = packet(self.root) is aten.linalg_vector_norm
        under = self.values.get(self.root if length else self.root.args[0])
        if under is None:
            return Refused(self.root, "what is under the root is not a mean square of rows")
        under = algebra.power(under, 2) if length else under
        rstd, xhat, eps, kind = self._of_statistics(under)
        if xhat is None:
            return Refused(self.root, "what is under the root is not a mean square of rows plus eps")
        self.xhat, self.rstd = xhat, rstd
        self.values.under = under
        self.values.get(self.root)
        self.dependent = [self.root, *self.values.spread([self.root])]
        if self.values.least:  # a length that is no less than this; next to it, an eps under the root is not seen
            eps += self.values.least**2 / value_of(self.x).shape[-1]
        best, outputs, covered, affine = -1, [], set(), None
        for node in self.dependent:
            given = self._affine(self.values.known[node]) if self.values.is_full(node) else None
            if given is None:
                continue
            parts = sum(part is not None for part in given[::2])
            if parts > best:
                best, outputs, covered, affine = parts, [], set(), given
            if parts == best and given == affine:
                if not covered.intersection(node.all_input_nodes):
                    outputs.append(node)
                covered.add(node)
        if self.original and affine != (self.original.weight, self.original.offset, self.original.bias):
            weight, offset, bias = self.original.weight, self.original.offset, self.original.bias
            return Found(self.original.form, kind, eps, self.x, weight, bias, offset, [], self.root)
        if affine is None:
            return Refused(self.root, "nothing is normalized by it")
        weight, offset, bias = affine
        form = f"composite {'layer norm' if kind == 'layer' else 'rms'}"
        if offset:
            form += f", weight + {offset:g}"
        elif weight is not None and packet(self.root) is aten.rsqrt and self._cast_before_weight(outputs[0]):
            form += ", cast before the weight"
        return Found(form, kind, eps, self.x, weight, bias, offset, outputs, self.root)

    def _of_statistics(self, under: Polynomial) -> tuple[Polynomial | None, Polynomial | None, float, str]:
        """``(rstd, xhat, eps, kind)`` where ``under`` is a multiple of variance or mean square plus eps."""
        x = algebra.factor("full", self.x)
        mean, squares = algebra.row_mean(x), algebra.row_mean(algebra.power(x, 2))
        times = under.get(next(iter(squares)), 0.0)
        eps = under.get(algebra.ONE, 0.0) / times if times > 0 else -1.0
        if eps < 0:
            return None, None, eps, ""
        rstd = algebra.multiply(algebra.power(under, -0.5), algebra.constant(times**0.5))
        for kind, centered, moment in (
            ("rms", x, squares),
            ("layer", algebra.add(x, mean, -1.0), algebra.add(squares, algebra.power(mean, 2), -1.0)),
        ):
            if algebra.same(
                under, algebra.multiply(algebra.add(moment, algebra.constant(eps)), algebra.constant(times))
            ):
                return rstd, algebra.multiply(centered, rstd), eps, kind
        return None, None, eps, ""

    def _affine(self, given: Polynomial) -> tuple[fx.Node | None, float, fx.Node | None] | None:
        """``(weight, offset, bias)`` if ``given`` is ``xhat * (weight + offset) + bias``."""
        bias = {m: c for m, c in given.items() if all(key[0] == "column" for key, _ in m)}
        scaled = {m: c for m, c in given.items() if m not in bias}
        weights, biases = algebra.keys(scaled, "column"), algebra.keys(bias, "column")
        if len(weights) > 1 or len(biases) > 1 or algebra.ONE in bias:
            return None
        first = next(iter(self.xhat))
        offset = scaled.get(first, 0.0) / self.xhat[first]
        weight, shift = next(iter(weights), None), next(iter(biases), None)
        if (weight is None and abs(offset - 1) > 1e-6) or (shift is not None and weight is None):
            return None
        expected = algebra.multiply(self.xhat, self._scale(weight, offset))
        if shift is not None:
            expected = algebra.add(expected, algebra.factor("column", shift))
        return (weight, offset if weight is not None else 0.0, shift) if algebra.same(given, expected) else None

    @staticmethod
    def _scale(weight: fx.Node | None, offset: float) -> Polynomial:
        if weight is None:
            return algebra.constant(1)
        return algebra.add(algebra.factor("column", weight), algebra.constant(offset))

    def _cast_before_weight(self, y: fx.Node) -> bool:
        """Whether xhat is rounded before it is scaled, as Hugging Face does."""
        return any(is_copy(n) and value_of(n).dtype != value_of(n.args[0]).dtype for n in y.all_input_nodes
                   if n in self.values.known and self.values.is_full(n))  # fmt: skip

    # Backward

    def _backward(self, found: Found) -> Values | None:
        """Find the gradients; what was read on the way, or None."""
        for dy in self._candidates():
            values = self.values.with_gradient(dy)
            read = values.spread([dy, *self.dependent])
            gradient = self._gradient(found, values, dy, read)
            if gradient.results():
                found.gradient = gradient
                return values
        return None

    def _candidates(self) -> list[fx.Node]:
        """Tensors that may be the gradient of y: what intermediate results are multiplied with in backward."""
        inner = [n for n in self.values.known if n.op == "call_function" and n is not self.x]
        candidates: dict[fx.Node, None] = {}
        for node in inner:
            for user in node.users:
                if user in self.values.known or phase_of(user) != "backward":
                    continue
                if packet(user) not in (aten.mul, aten.div):
                    continue
                for other in user.all_input_nodes:
                    if other not in self.values.known and self.values.is_full(other):
                        candidates[self._before_weight(other)] = None
        return list(candidates)[:8]

    def _before_weight(self, node: fx.Node) -> fx.Node:
        """``dy`` in ``dy * weight`` and casts. A number that y is multiplied with is not part of the norm: its
        product with a gradient is ``dy`` itself."""
        while True:
            node = before_widening(node)
            if packet(node) is not aten.mul or len(node.all_input_nodes) < 2:
                return node
            full = [a for a in node.args if isinstance(a, fx.Node) and self.values.is_full(a)]
            if len(full) != 1 or not all(a in full or self.values.get(a) for a in node.all_input_nodes):
                return node
            node = full[0]

    def _gradient(self, found: Found, values: Values, dy: fx.Node, read: list[fx.Node]) -> Gradient:
        """The first node that equals each derivative."""
        slope = algebra.factor("full", dy)
        dims = values.longer_than_one(range(len(values.shape) - (1 if found.weight is None else _rank(found.weight))))
        wanted = {
            "dx": self._derivative(found, slope),
            "dw": algebra.column_sum(algebra.multiply(slope, self.xhat), dims) if found.weight is not None else None,
            "db": algebra.column_sum(slope, dims) if found.bias is not None else None,
        }
        gradient = Gradient(dy, self.x)
        copies = [n for n in self.copies if any(phase_of(u) == "backward" and u in values.known for u in n.users)]
        if copies:
            gradient.x = copies[0]
        for node in read:
            given, other = values.sums.get(node) or (values.known[node], None)
            for name, expected in wanted.items():
                if expected is None or getattr(gradient, name) is not None or not algebra.same(given, expected):
                    continue
                if name != "dx" and other is None:
                    setattr(gradient, name, node)
                elif name == "dx" and values.is_full(node) and other not in (self.x, dy):
                    gradient.dx, gradient.dh = node, other
        return gradient

    def _derivative(self, found: Found, dy: Polynomial) -> Polynomial:
        """``rstd * (g - xhat * mean(g * xhat))``, for a layer norm less the mean of g; g = dy * (weight + offset)."""
        g = algebra.multiply(dy, self._scale(found.weight, found.offset))
        inner = algebra.add(g, algebra.multiply(self.xhat, algebra.row_mean(algebra.multiply(g, self.xhat))), -1.0)
        if found.kind == "layer":
            inner = algebra.add(inner, algebra.row_mean(g), -1.0)
        return algebra.multiply(self.rstd, inner)


def _rank(weight: fx.Node) -> int:
    shape = list(value_of(weight).shape)
    while len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return len(shape)


_FUSED = {aten._fused_rms_norm: "rms", aten.native_layer_norm: "layer"}
_FUSED_BACKWARD = (aten._fused_rms_norm_backward, aten.native_layer_norm_backward)


def find(graph: fx.Graph) -> list[Found | Refused]:
    """Every norm of ``graph``, and what looked like one but is none, in order."""
    recomputed: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if "recomputes" in node.meta:
            recomputed.setdefault(node.meta["recomputes"], []).append(node)
    by_root: dict[str, Found] = {}
    results: list[Found | Refused] = []
    for node in graph.nodes:
        if phase_of(node) == "optimizer":
            continue
        original = by_root.get(node.meta.get("recomputes"))
        if packet(node) in _FUSED:
            found = _fused(node)
        elif packet(node) in ROOTS and (source := normalized(node)) is not None:
            found = Composite(node, source, recomputed.get(source.name, []), original).match()
        else:
            continue
        if isinstance(found, Found):
            by_root[node.name], found.original = found, original
        results.append(found)
    results = _with_one_owner(results)
    complete([found for found in results if isinstance(found, Found)])
    return results


def _with_one_owner(results: list[Found | Refused]) -> list[Found | Refused]:
    """Each gradient belongs to the first norm that it is one of. Where a norm is recomputed in part, its copy
    equals it, and so do their gradients; a copy without outputs of its own is then no norm."""
    owners: dict[fx.Node, Found] = {}
    kept = []
    for found in results:
        if isinstance(found, Found) and found.gradient:
            owner = next((owners[node] for node in found.gradient.results() if node in owners), None)
            if owner is None:
                owners |= dict.fromkeys(found.gradient.results(), found)
            else:
                found.gradient = None
                found.nodes = [node for node in found.nodes if node not in owner.nodes]
                if not found.outputs:
                    continue
        kept.append(found)
    return kept


def _fused(node: fx.Node) -> Found | Refused:
    x, shape, weight = node.args[:3]
    kind, parts = _FUSED[packet(node)], getitem_users(node)
    if len(shape) != 1:
        return Refused(node, f"it normalizes {len(shape)} dimensions at once")
    bias = node.args[3] if kind == "layer" else None
    eps = argument(node, "eps")
    eps = default_eps(value_of(x).dtype) if eps is None else eps
    outputs = [parts[0]] if 0 in parts and parts[0].users else []
    form = f"fused {'layer norm' if kind == 'layer' else 'rms'}"
    found = Found(form, kind, eps, x, weight, bias, 0.0, outputs, node)
    statistics = [part for i, part in parts.items() if i > 0]
    readers = {user for part in statistics for user in part.users}
    if any(packet(r) not in _FUSED_BACKWARD for r in readers):
        return Refused(node, "its statistics are read elsewhere")
    if len(readers) > 1:
        return Refused(node, "it has more than one backward")
    found.nodes = [node, *parts.values()]
    for backward in readers:
        results = getitem_users(backward)
        found.gradient = Gradient(backward.args[0], backward.args[1], None, *(results.get(i) for i in range(3)))
        found.nodes += [backward, *results.values()]
    return found

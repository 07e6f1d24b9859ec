"""One operator for the norms of the queries and the keys of an attention.

Before -> after: ``q' = norm(q)``, ``k' = norm(k)`` -> ``stepgraph::norm_pair(q, k)``, and the same in backward. What
the second norm needs of the nodes between the two moves before the first.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import EXPENSIVE, is_pure, packet
from stepgraph.passes.norm.rewrite import Found, Rewriter, inverse, order_of, ours, permuted
from stepgraph.passes.norm.values import value_of

aten = torch.ops.aten
_PRODUCTS = (aten.bmm, aten.baddbmm)


def find(norms: Sequence[Found]) -> list[tuple[Found, Found]]:
    """The pairs of norms that one operator can compute."""
    by_attention: dict[fx.Node, list[Found]] = {}
    for found in norms:
        if found.kind == "rms" and found.bias is None and len(found.outputs) == 1 and value_of(found.x).ndim > 2:
            attention = _attention(found.outputs[0])
            if attention is not None:
                by_attention.setdefault(attention, []).append(found)
    return [tuple(both) for both in by_attention.values() if len(both) == 2 and _alike(*both)]


def _attention(y: fx.Node) -> fx.Node | None:
    """The attention that ``y`` goes into, through whatever is no matrix product with a weight."""
    queue, seen = [y], {y}
    for node in queue:
        for user in sorted(node.users):
            if _is_attention(user):
                return user
            cheap = user.op == "call_function" and packet(user) not in EXPENSIVE
            if user not in seen and cheap and len(seen) < 64:
                seen.add(user)
                queue.append(user)
    return None


def _is_attention(node: fx.Node) -> bool:
    if packet(node) in _PRODUCTS:
        return True
    return node.op == "call_function" and "attention" in str(node.target) and "backward" not in str(node.target)


def _alike(q: Found, k: Found) -> bool:
    """Whether the operator's conditions hold for both."""

    def form(found: Found) -> tuple:
        x, y, gradient = value_of(found.x), value_of(found.outputs[0]), found.gradient
        weight = None if found.weight is None else value_of(found.weight).dtype
        needs = gradient and (gradient.dx is not None, gradient.dw is not None)
        return x.shape[-1], x.dtype, y.dtype, found.eps, found.offset, weight, needs

    if form(q) != form(k):
        return False
    return all(f.gradient.dx is not None and f.gradient.dh is None for f in (q, k) if f.gradient)


def rewrite(rewriter: Rewriter, q: Found, k: Found, aliases: Aliases) -> bool:
    """Put one operator in place of both norms. False, and nothing is changed, where they cannot be brought together.

    ``aliases``: of the graph before any rewrite.
    """
    first, second = sorted((q, k), key=lambda f: f.outputs[0])
    place = first.outputs[0]
    forward = _between([rewriter.now(second.x), rewriter.now(second.weight)], place, first, aliases)
    backward: list[fx.Node] | None = []
    if q.gradient:
        sooner = min((q, k), key=lambda f: min(f.gradient.results()))
        later = k if sooner is q else q
        at = min(sooner.gradient.results())
        needed = [rewriter.now(n) for f in (sooner, later) for n in (f.gradient.dy, f.gradient.x)]
        backward = _between(needed, at, sooner, aliases)
    if forward is None or backward is None:
        return False
    for node in forward:
        place.prepend(node)
    statistics = _rewrite_forward(rewriter, q, k, place)
    if q.gradient:
        for node in backward:
            at.prepend(node)
        _rewrite_backward(rewriter, q, k, statistics, at)
    for found in (q, k):
        rewriter.erase(found)
    return True


def _options(q: Found) -> tuple:
    return value_of(q.outputs[0]).dtype, "rms", q.eps, q.offset


def _rewrite_forward(rewriter: Rewriter, q: Found, k: Found, place: fx.Node) -> list[fx.Node]:
    """Compute both norms before ``place``; their statistics."""
    build, outputs = Builder(place, before=place), [q.outputs[0], k.outputs[0]]
    x = _inputs(build, rewriter, [q.x, k.x], outputs)
    weights = [rewriter.weight(build, f.weight) for f in (q, k)]
    node = build(ours.norm_pair.default, *x, *weights, *_options(q))
    saved = q.gradient or rewriter.read_later & {q.root, k.root}
    parts = [build(operator.getitem, node, i) for i in range(4 if saved else 2)]
    statistics = _restored(build, parts[2:], outputs)
    for f, rstd in zip((q, k), statistics, strict=False):
        rewriter.statistics[f.root] = None, rstd
    for old, new in zip(outputs, _restored(build, parts[:2], outputs), strict=True):
        rewriter.replace(old, new)
    return statistics


def _rewrite_backward(rewriter: Rewriter, q: Found, k: Found, statistics: list[fx.Node], place: fx.Node) -> None:
    """Compute both norms' gradients before ``place``."""
    build, gradients = Builder(place, before=place), [q.gradient, k.gradient]
    dx = [g.dx for g in gradients]
    sides = [[g.dy for g in gradients], [g.x for g in gradients], statistics]
    dy, x, statistics = (_inputs(build, rewriter, side, dx) for side in sides)
    weights = [rewriter.weight(build, f.weight) for f in (q, k)]
    needs = True, q.gradient.dw is not None
    node = build(ours.norm_pair_backward.default, *dy, *x, *weights, *statistics, *_options(q), *needs)
    new = _restored(build, [build(operator.getitem, node, i) for i in range(2)], dx)
    if q.gradient.dw is not None:
        new += [build(operator.getitem, node, i) for i in (2, 3)]
    for old, result in zip([*dx, *(g.dw for g in gradients)], new, strict=False):
        rewriter.replace_shaped(build, old, result)


def _inputs(build: Builder, rewriter: Rewriter, nodes: list[fx.Node], like: list[fx.Node]) -> list[fx.Node]:
    """``nodes`` with their dimensions in the order in which ``like`` lie in memory."""
    return [permuted(build, rewriter.now(n), order_of(m), like=m) for n, m in zip(nodes, like, strict=True)]


def _restored(build: Builder, nodes: list[fx.Node], like: list[fx.Node]) -> list[fx.Node]:
    """The inverse of `_inputs`."""
    return [permuted(build, n, inverse(order_of(m)), like=m) for n, m in zip(nodes, like, strict=False)]


def _between(needed: list[fx.Node | None], place: fx.Node, first: Found, aliases: Aliases) -> list[fx.Node] | None:
    """The nodes after ``place`` that ``needed`` are made of, in order; None if they cannot be moved before it."""
    found: set[fx.Node] = set()
    queue = [node for node in needed if node is not None]
    while queue:
        node = queue.pop()
        if node in found or node < place or node.op != "call_function":
            continue
        if node in first.nodes or not is_pure(node) or len(found) > 64:
            return None
        at = aliases.position
        before = [source for source in node.all_input_nodes if source in at]  # the others are new: nobody writes them
        if node in at and any(aliases.written_between(source, at[place], at[node]) for source in before):
            return None
        found.add(node)
        queue += node.all_input_nodes
    return sorted(found)

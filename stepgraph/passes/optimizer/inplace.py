"""In-place update: the optimizer and clipping overwrite their inputs.

Matches: functional operators of the optimizer phase whose result is copied into an input of the graph, or whose
first argument is dead afterwards: memory that the graph allocated, or a gradient accumulator, which is reset before
the next step. Before -> after:

    copy_(m, lerp(m, g, w))               ->  lerp_(m, g, w)
    mul(g, c), g dead after it            ->  mul_(g, c)
    _foreach_mul([g, ...], c), the same   ->  _foreach_mul_([g, ...], c)

Tier exact: in-place operators run the same kernels. Preconditions: nothing reads the old value later, and every
accumulator is a tensor of its own.
"""

from collections import Counter

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, replace_all
from stepgraph.graph.facts import getitem_users, is_overload, tensor_bytes
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.values import Accumulator
from stepgraph.kernels import add_scaled  # noqa: F401  (defines operators of torch.ops.stepgraph)
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph

_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.addcmul.default: aten.addcmul_.default,
    aten.div.Tensor: aten.div_.Tensor,
    aten.lerp.Scalar: aten.lerp_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.sqrt.default: aten.sqrt_.default,
    ours.add_scaled.default: ours.add_scaled_.default,
}


@register("inplace_update", "exact")
def inplace_update(step: StepGraph, options: object, report: PassReport) -> None:
    """Update parameters, optimizer state and clipped gradients in place, without copies."""
    saved = 0
    for node in list(step.graph.nodes):
        if phase_of(node) != "optimizer" or not is_overload(node):
            continue
        if node.target is aten._foreach_mul.Tensor:
            saved += _foreach_mul(step, node, report)
    saved += _chains(step, report)
    saved += _dead_first_arguments(step, report)
    report.summary = f"{report.changed} of {report.matched} updates made in place, {saved / 2**20:.1f} MiB not copied"


def _foreach_mul(step: StepGraph, node: fx.Node, report: PassReport) -> int:
    """Gradients clipped all at once: ``_foreach_mul(grads, c)`` with every gradient dead after."""
    grads, factor = node.args
    report.matched += len(grads)
    items = getitem_users(node)
    scratch = _Scratch(step)
    root = scratch.aliases.root
    readers = Counter(root(g) for g in (*grads, factor))
    dead = [
        k
        for k, grad in enumerate(grads)
        if k in items and _same_form(items[k], grad) and scratch.dies_in(node, grad) and readers[root(grad)] == 1
    ]
    if not dead:
        return 0
    rest = [k for k in range(len(grads)) if k not in set(dead)]
    Builder(node, before=node)(aten._foreach_mul_.Tensor, [grads[k] for k in dead], factor)
    replace_all({items[k]: grads[k] for k in dead})
    for place, k in enumerate(rest):
        items[k].update_arg(1, place)
    node.update_arg(0, [grads[k] for k in rest])
    node.meta["val"] = [node.meta["val"][k] for k in rest]
    if not rest:
        step.graph.erase_node(node)
    report.changed += len(dead)
    return sum(tensor_bytes(grads[k]) for k in dead)


class _Scratch:
    """Memory that a node may write over: what the graph allocated, and gradient accumulators."""

    def __init__(self, step: StepGraph):
        self.aliases = Aliases(step.graph)
        self.last = self.aliases.last_use()
        self.accumulators = set(step.placeholders(Accumulator))

    def dies_in(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether ``value`` lies in such memory and ``node`` is the last to read it."""
        root = self.aliases.root(value)
        owned = root.op == "call_function" or root in self.accumulators
        return owned and self.last[root] <= self.aliases.position[node]


def _chains(step: StepGraph, report: PassReport) -> int:
    """``copy_(p, op(... op(p, a) ..., b))`` with every link read only by the next: all links write into ``p``."""
    saved = 0
    aliases = Aliases(step.graph)
    for copy in list(step.graph.nodes):
        if copy.target is not aten.copy_.default or copy.args[0].op != "placeholder" or phase_of(copy) != "optimizer":
            continue
        target, result = copy.args
        if not isinstance(result, fx.Node) or result.target not in _IN_PLACE:
            continue
        report.matched += 1
        chain, current = [], result
        while current is not target and isinstance(current, fx.Node) and current.target in _IN_PLACE:
            chain.append(current)
            current = current.args[0]
        first, last = aliases.position[chain[-1]], aliases.position[copy]
        others = aliases.reads(target, besides=(copy, chain[-1]))
        links_private = all(len(link.users) == 1 for link in chain[1:])
        returned = any(user.op == "output" for user in result.users)  # who called the step keeps it
        same = all(_same_form(link, target) for link in chain)
        if current is not target or not links_private or returned or not same or any(first < p < last for p in others):
            continue
        for link in reversed(chain):
            link.target = _IN_PLACE[link.target]
            link.update_arg(0, target)
        for link in chain:
            link.replace_all_uses_with(target, delete_user_cb=lambda user, link=link: user is not link)
        copy.replace_all_uses_with(target)
        step.graph.erase_node(copy)
        saved += len(chain) * tensor_bytes(target)
        report.changed += 1
    return saved


def _same_form(a: fx.Node, b: fx.Node) -> bool:
    """Whether both have one shape, dtype and strides. Then a new result fits into the other's memory, and no two of
    its elements share memory."""
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()


def _dead_first_arguments(step: StepGraph, report: PassReport) -> int:
    """``op(x, ...)`` in the optimizer phase whose ``x`` dies there -> ``op_(x, ...)``."""
    saved = 0
    scratch = _Scratch(step)
    root = scratch.aliases.root
    for node in list(step.graph.nodes):
        if phase_of(node) != "optimizer" or node.target not in _IN_PLACE:
            continue
        value = node.args[0]
        if not isinstance(value, fx.Node) or not _same_form(node, value) or node.meta["val"].ndim == 0:
            continue
        report.matched += 1
        others = {root(a) for a in node.all_input_nodes if a is not value}
        if root(value) in others or not scratch.dies_in(node, value):
            continue
        node.target = _IN_PLACE[node.target]
        scratch.aliases.merge(node, root(value), scratch.last)
        saved += tensor_bytes(node)
        report.changed += 1
    return saved

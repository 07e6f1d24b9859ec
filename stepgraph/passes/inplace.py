"""In-place update: the optimizer and clipping write where their inputs lie.

Matches: functional operators of the optimizer phase whose result is copied into an input of the graph, or whose
first argument is dead afterwards. Before -> after: ``copy_(p, _fused_adamw(p, ...)[0])`` -> ``_fused_adamw_(p, ...)``;
``copy_(m, lerp(m, g, w))`` -> ``lerp_(m, g, w)``; ``mul(g, c)`` with g dead after -> ``mul_(g, c)``.
Exact: in-place operators run the same kernels. Preconditions: nothing reads the old value later.
"""

import torch
from torch import fx

from stepgraph.capture import StepGraph, phase_of
from stepgraph.passes.analysis import Aliases, is_overload, tensor_bytes
from stepgraph.passes.cleanup import getitem_users
from stepgraph.passes.contract import PassReport, register

aten = torch.ops.aten

_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.addcmul.default: aten.addcmul_.default,
    aten.div.Tensor: aten.div_.Tensor,
    aten.lerp.Scalar: aten.lerp_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.sqrt.default: aten.sqrt_.default,
}


@register("inplace_update", "exact")
def inplace_update(step: StepGraph, options: object, report: PassReport) -> None:
    """Update parameters, optimizer state and clipped gradients in place, without copies."""
    saved = 0
    for node in list(step.graph.nodes):
        if phase_of(node) != "optimizer" or not is_overload(node):
            continue
        if node.target is aten._fused_adamw.tensor_lr:
            saved += _fused(step, node, report)
        elif node.target in (aten._foreach_add.Scalar, aten._foreach_mul.Tensor):
            saved += _foreach(step, node, report)
    saved += _chains(step, report)
    saved += _dead_first_arguments(step, report)
    report.summary = f"{report.changed} of {report.matched} updates made in place, {saved / 2**20:.1f} MiB not copied"


def _copy_into(node: fx.Node, target: fx.Node) -> fx.Node | None:
    """The ``copy_`` that writes ``node``'s result into the input ``target``, if there is one."""
    if target.op != "placeholder":
        return None
    return next((u for u in node.users if u.target is aten.copy_.default and u.args == (target, node)), None)


def _redirect(step: StepGraph, result: fx.Node, target: fx.Node) -> None:
    """``result`` is now in ``target``'s storage: its ``copy_`` into it goes, other readers read ``target``."""
    for user in list(result.users):
        if user.target is aten.copy_.default and user.args == (target, result):
            user.replace_all_uses_with(target)
            step.graph.erase_node(user)
    result.replace_all_uses_with(target)
    step.graph.erase_node(result)


def _fused(step: StepGraph, node: fx.Node, report: PassReport) -> int:
    """The fused AdamW node: all of its state at once."""
    for item in [i for outer in node.users for i in outer.users if not i.users] + list(node.users):
        if not item.users:
            step.graph.erase_node(item)
    lists = getitem_users(node)
    targets = {0: node.args[0], 2: node.args[2], 3: node.args[3]}
    report.matched += sum(len(t) for t in targets.values())
    results: list[tuple[fx.Node, fx.Node]] = []
    for i, inputs in targets.items():
        items = getitem_users(lists[i]) if i in lists else {}
        for k, target in enumerate(inputs):
            result = items.get(k)
            if result is None or _copy_into(result, target) is None:
                report.notes.append(f"{node.name}: {target.name} is not simply updated; the update keeps its copies")
                return 0
            results.append((result, target))
    with step.graph.inserting_before(node):
        new = step.graph.call_function(aten._fused_adamw_.tensor_lr, node.args, node.kwargs)
    new.meta.update({k: v for k, v in node.meta.items() if k != "val"}, val=None)
    saved = sum(tensor_bytes(target) for _, target in results)
    saved += sum(tensor_bytes(grad) for grad in node.args[1])  # the functional operator copies the gradients too
    for result, target in results:
        _redirect(step, result, target)
    for item in lists.values():
        if not item.users:
            step.graph.erase_node(item)
    step.graph.erase_node(node)
    report.changed += len(results)
    return saved


def _foreach(step: StepGraph, node: fx.Node, report: PassReport) -> int:
    """Step counters (``_foreach_add`` copied into inputs) and clipped gradients (``_foreach_mul`` of dead ones)."""
    report.matched += len(node.args[0])
    items = getitem_users(node)
    aliases = Aliases(step.graph)
    last = aliases.last_use()
    for k, target in enumerate(node.args[0]):
        result = items.get(k)
        copy = result and _copy_into(result, target)
        into_input = copy is not None
        if result is None or not (into_input or _is_dead_after(aliases, last, target, node)):
            return 0
        if into_input and any(p > aliases.position[node] for p in aliases.reads(target, besides=(copy,))):
            return 0
    in_place = {
        aten._foreach_add.Scalar: aten._foreach_add_.Scalar,
        aten._foreach_mul.Tensor: aten._foreach_mul_.Tensor,
    }
    with step.graph.inserting_before(node):
        new = step.graph.call_function(in_place[node.target], node.args, node.kwargs)
    new.meta.update({k: v for k, v in node.meta.items() if k != "val"}, val=None)
    saved = sum(tensor_bytes(t) for t in node.args[0])
    for k, target in enumerate(new.args[0]):
        _redirect(step, items[k], target)
    step.graph.erase_node(node)
    report.changed += len(new.args[0])
    return saved


def _is_dead_after(aliases: Aliases, last: dict[fx.Node, int], value: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` is the last to read the storage of ``value``, which the graph itself allocated densely."""
    root = aliases.root(value)
    if root.op != "call_function" or last[root] > aliases.position[node]:
        return False
    tensor = value.meta["val"]
    return all(stride != 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
        first = aliases.position[chain[-1]]
        others = aliases.reads(target, besides=(copy, chain[-1]))
        links_private = all(len(link.users) == 1 for link in chain[1:])
        same = all(_same_form(link, target) for link in chain)
        if current is not target or not links_private or not same or any(p > first for p in others):
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
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()


def _dead_first_arguments(step: StepGraph, report: PassReport) -> int:
    """``op(x, ...)`` in the optimizer phase whose ``x`` dies there -> ``op_(x, ...)``."""
    saved = 0
    aliases = Aliases(step.graph)
    last = aliases.last_use()
    for node in list(step.graph.nodes):
        if phase_of(node) != "optimizer" or node.target not in _IN_PLACE:
            continue
        value = node.args[0]
        if not isinstance(value, fx.Node) or not _same_form(node, value) or node.meta["val"].ndim == 0:
            continue
        report.matched += 1
        others = {aliases.root(a) for a in node.all_input_nodes if a is not value}
        if aliases.root(value) in others or not _is_dead_after(aliases, last, value, node):
            continue
        node.target = _IN_PLACE[node.target]
        aliases.merge(node, aliases.root(value), last)
        saved += tensor_bytes(node)
        report.changed += 1
    return saved

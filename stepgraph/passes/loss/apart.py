"""Splits a head whose logits several losses read into one head each, so that `fuse_loss` chunks them all.

Matches: the logits ``x w^T`` that softmaxes of several losses take, as cross entropy and a divergence at a temperature
do in distillation, and the detached ones of a head that another one learns from. At most two have a gradient, and
these meet in one sum before the products for ``dx`` and ``dw``. Before -> after:

    logits = x w^T; a(logits) + b(logits / T)   ->  logits_a = x w^T; a(logits_a);  logits_b = x w^T; b(logits_b / T)
    g = g_a + g_b; dx = g w; dw = g^T x         ->  dx = g_a w + g_b w; dw = g_a^T x + g_b^T x

No tensor of all logits is left, for three products more. Preconditions: nothing else reads the logits, all losses then
match, and the logits are computed in several parts.
"""

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import factor_of, only_user
from stepgraph.passes.loss.head import readers
from stepgraph.passes.loss.tokens import BACKWARDS, PRODUCTS, SOFTMAXES, keeps_rows, pads_rows

aten = torch.ops.aten


def shared(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The products whose logits the softmaxes of several losses take: what these take, in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in SOFTMAXES and (chain := _chain(node.args[0])):
            taken = found.setdefault(chain[-1], [])
            taken += [node.args[0]] if node.args[0] not in taken else []
    return {product: taken for product, taken in found.items() if len(taken) > 1}


def separate(taken: list[fx.Node]) -> list[fx.Node] | str:
    """Make a product for each loss of those ``taken``; their first softmaxes, or why nothing was done."""
    chains = [_chain(node) for node in taken]
    common = [node for node in chains[0] if all(node in chain for chain in chains)]  # from the fork up to the product
    fork = common[0]
    softmaxes = [[user for user in node.users if user.target in SOFTMAXES] for node in taken]
    # What reads the fork, of each: the last of its branch, or its softmaxes.
    firsts = [
        {next((n for n in reversed(chain) if n not in common), None)} - {None} or {*nodes}
        for chain, nodes in zip(chains, softmaxes, strict=True)
    ]
    if set(fork.users) != set().union(*firsts) or any(len(node.users) > 1 for node in common[1:]):
        return "its logits are read elsewhere"
    if reason := _separate_gradients(softmaxes):
        return reason
    behind = fork.next
    for firsts_of_one in firsts[1:]:
        made: dict[fx.Node, fx.Node] = {}
        for node in reversed(common):
            made[node] = _copy(node, made, behind)
        for user in firsts_of_one:
            user.replace_input_with(fork, made[fork])
    return [nodes[0] for nodes in softmaxes]


def _separate_gradients(softmaxes: list[list[fx.Node]]) -> str | None:
    """Multiply the gradients of two losses instead of their sum; or why not. One alone is none's sum."""
    reached = [some for some in map(_reached, softmaxes) if some]
    if len(reached) < 2:
        return None
    meet = next((node for node in reached[0] if node in reached[1]), None)
    if len(reached) > 2 or meet is None or meet.target is not aten.add.Tensor or meet.kwargs:
        return "the gradients of its losses do not meet in one sum"
    pairs = (reached, reached[::-1])
    sides = [next((n for n in meet.args if n in some and n not in rest), None) for some, rest in pairs]
    tail = [meet]
    while (user := only_user(tail[-1])) is not None and (factor_of(user) or keeps_rows(user) or pads_rows(user)):
        tail.append(user)
    ends = [n for u in tail[-1].users for n in (u.users if u.target is aten.t.default else (u,))]
    if None in sides or not all(n.target in (aten.mm.default, aten.sum.dim_IntList) for n in ends):
        return "the gradient of its logits is read elsewhere"
    turned, copies = [u for u in tail[-1].users if u.target is aten.t.default], []
    for side in sides:
        made = {meet: side}
        for node in (*tail[1:], *turned, *ends):
            made[node] = _copy(node, made, node)
        copies.append(made)
    for end in ends:
        end.replace_all_uses_with(Builder(end, before=end)(aten.add.Tensor, *(made[end] for made in copies)))
    erase_unread(*ends)
    return None


def _chain(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is made of, up to the product of a head; empty without one."""
    found = [node]
    while node.target not in PRODUCTS:
        if node.op != "call_function" or not (factor_of(node) or keeps_rows(node)):
            return []
        found.append(node := node.args[0])
    return found


def _reached(softmaxes: list[fx.Node]) -> list[fx.Node]:
    """What is made of the gradients of ``softmaxes`` row by row, in the order of the graph."""
    queue = [user for node in softmaxes for user in readers(node) if user.target in BACKWARDS]
    found = set(queue)
    while queue:
        for user in queue.pop().users:
            linear = user.target is aten.add.Tensor or factor_of(user) or keeps_rows(user) or pads_rows(user)
            if linear and user not in found:
                found.add(user)
                queue.append(user)
    return sorted(found)


def _copy(node: fx.Node, made: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    with node.graph.inserting_before(before):
        return node.graph.node_copy(node, lambda n: made.get(n, n))

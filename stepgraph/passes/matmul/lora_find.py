"""Low-rank adapters among the linear layers of a step, as the pass `lora` takes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import RESHAPES, behind_reshapes, only_user, packet
from stepgraph.passes.contract import StepGraph
from stepgraph.passes.matmul.layers import Layer

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass
class Adapter:
    """``down``: t = x A^T. ``up``: t B^T, which reads only that. ``end``: the sum with the product ``base`` of the same
    layer, None where that is none; ``addend``: what ``end`` adds, the product or another. ``scale``: s. ``why_not``:
    why ``up`` is not added by a product, ``""`` where our operators add it."""

    down: Layer
    up: Layer
    scale: float = 1.0
    base: fx.Node | None = None
    end: fx.Node | None = None
    addend: fx.Node | None = None
    why_not: str | None = None


def has_chain(step: StepGraph) -> bool:
    """Whether a product reads another one, viewed in other shapes at most."""
    products = step.calling(*PRODUCTS)
    return any(behind_reshapes(node.args[-2]).target in PRODUCTS for node in products)


def find_adapters(layers: Sequence[Layer], aliases: Aliases) -> Iterator[Adapter]:
    """Pairs of layers with nothing between them, the first narrower than what it reads and the second gives."""
    downs = {layer.forward.node: layer for layer in layers}
    for up in layers:
        t = up.forward.a.node
        down = downs.get(aliases.root(t))
        if down is None or behind_reshapes(t) is not down.forward.node or up.forward.why_not or down.forward.bias:
            continue
        (_, width, rank), inner = up.forward.sizes, down.forward.sizes[2]
        if rank < width and rank < inner and not down.forward.why_not:
            yield _ended(Adapter(down, up), aliases)


def _ended(adapter: Adapter, aliases: Aliases) -> Adapter:
    """Follow what reads the product with B, to its sum with the base layer's."""
    node = adapter.up.forward.node
    if adapter.up.forward.bias is not None:
        adapter.why_not = "B has a bias"
    while adapter.why_not is None:
        user = only_user(node)
        if user is None:
            adapter.why_not = "several operators read what it adds"
        elif user.target is aten.mul.Tensor and isinstance(user.args[1], (int, float)):
            adapter.scale *= user.args[1]
        elif user.target is aten.add.Tensor and is_plain_sum(user):
            adapter.end, adapter.addend = user, user.args[0] if user.args[1] is node else user.args[1]
            base = _below(adapter.addend)
            if not _is_product(base) or base.meta["val"].dtype != user.meta["val"].dtype:
                adapter.why_not = f"what it is added to is not a product in its dtype, but {packet(base) or base.op}"
            elif base.meta["val"].shape != adapter.up.forward.node.meta["val"].shape:
                adapter.why_not = "the base layer's product has another shape"
            elif any(overwritten(product, user, aliases) for product in (base, adapter.up.forward.node)):
                adapter.why_not = "what its products read is written to before their sum"
            else:
                adapter.base = base
            break
        elif user.target not in RESHAPES:
            adapter.why_not = f"{packet(user) or user.op} reads what it adds"
        node = user
    return adapter


def overwritten(node: fx.Node, last: fx.Node, aliases: Aliases) -> bool:
    """Whether what ``node`` reads is written to before ``last``."""
    at = aliases.position
    known = [source for source in node.all_input_nodes if source in at]
    return any(aliases.written_between(source, at[node], at[last]) for source in known)


def _below(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, as far as nothing else reads it."""
    while node.target in RESHAPES and only_user(node) is not None:
        node = node.args[0]
    return node


def _is_product(node: fx.Node) -> bool:
    """Whether only one operator reads the product of two matrices, which may have a bias for each column."""
    if only_user(node) is None or node.kwargs:
        return False
    biased = node.target is aten.addmm.default and node.args[0].meta["val"].ndim == 1
    return node.target is aten.mm.default or biased


def is_plain_sum(node: fx.Node) -> bool:
    """Whether the node adds two tensors of its own shape."""
    tensors = len(node.args) == 2 and not node.kwargs and all(isinstance(n, fx.Node) for n in node.args)
    return tensors and all(n.meta["val"].shape == node.meta["val"].shape for n in node.args)


def hoist(node: fx.Node, before: fx.Node) -> None:
    """Move what a weight is made by, gathers and casts, ``before`` where it is read now."""
    if before < node:
        for source in node.all_input_nodes:
            hoist(source, before)
        before.prepend(node)

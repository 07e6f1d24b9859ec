"""SwiGLU and GeGLU with the product of what the gate multiplies, and their gradients with the product before them.

    u = mm(x, w), h = act(g) * u                      ->  u, h = gated_product(x, w, g)
    dh = mm(dy, w),
    dg = act_backward(dh * u, g), du = dh * act(g)    ->  dg, du = gated_product_backward(dy, w, g, u)

The activation is SiLU, or GELU by tanh. ``g`` is most often another product with x; any node may give it. Chosen by
`product_epilogues`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread, replace_all
from stepgraph.graph.facts import RESHAPES, argument, behind_reshapes, only_user, other_input
from stepgraph.kernels import gated  # noqa: F401  (defines operators of torch.ops.stepgraph)
from stepgraph.passes.contract import StepGraph
from stepgraph.passes.matmul.pairs import Pair, feeds_products

aten, ours = torch.ops.aten, torch.ops.stepgraph


@dataclass
class _Forward(Pair):
    """``last`` is ``act`` times the product, and ``place`` the last node that the kernel reads."""

    act: fx.Node
    place: fx.Node
    what = "gated activation"

    def rewrite(self) -> None:
        product, act, h = self.product, self.act, self.last
        build = Builder(product, act, h, after=self.place)
        gate = build.view(act.args[0], product.meta["val"].shape)
        u, a = build.parts(build(ours.gated_product.default, *self.matrices, gate, activation_of(act)))
        views = [user for user in product.users if user.target in RESHAPES]
        new_of = {old: build.view(new, old.meta["val"].shape) for old, new in [(h, a), *((view, u) for view in views)]}
        replace_all(new_of | {product: u})
        erase_unread(act)


@dataclass
class _Backward(Pair):
    """``last`` is the gradient of the gate, ``dh`` the product in another shape, ``ds`` and ``du`` what read it."""

    dh: fx.Node
    ds: fx.Node
    du: fx.Node
    place: fx.Node
    what = "gradient of a gated activation"

    def rewrite(self) -> None:
        product, dg, shape = self.product, self.last, self.product.meta["val"].shape
        build = Builder(product, dg, self.du, before=self.place)
        gate, up = (build.view(n, shape) for n in (dg.args[1], other_input(self.ds, self.dh)))
        both = build(ours.gated_product_backward.default, *self.matrices, gate, up, activation_of(dg))
        act, olds = other_input(self.du, self.dh), (dg, self.du)
        views = [build.view(new, old.meta["val"].shape) for old, new in zip(olds, build.parts(both), strict=True)]
        replace_all(dict(zip(olds, views, strict=True)))
        erase_unread(self.ds, act)


def gated_pairs(step: StepGraph, aliases: Aliases) -> Iterator[Pair]:
    """Gated activations of products, and their gradients."""
    backward = list(_backward(step, aliases))  # first: the gradient of up looks like a forward pair
    yield from _forward(step, aliases, {pair.product for pair in backward})
    yield from backward


def _forward(step: StepGraph, aliases: Aliases, seen: set[fx.Node]) -> Iterator[_Forward]:
    """One pair per product, the first in the graph: an activation that backward recomputes is left."""
    for h in step.calling(aten.mul.Tensor):
        for act in h.all_input_nodes:
            up = other_input(h, act)
            if activation_of(act) is None or up is None or not feeds_products(h):
                continue
            product, gate = behind_reshapes(up), act.args[0]
            first, last = (aliases.position[n] for n in (product, h))
            place = max(product, gate, key=aliases.position.__getitem__)
            if (
                product.target is aten.mm.default
                and product not in seen
                and behind_reshapes(gate) is not product
                and _alike(h, up, act, gate)
                and all(aliases.position[user] > aliases.position[place] for user in _readers(product))
                and not any(aliases.written_between(n, first, last) for n in (*product.args, product, gate))
                and not aliases.written_between(act, aliases.position[act], last)
            ):
                seen.add(product)
                yield _Forward(product, h, act, place)
                break


def _backward(step: StepGraph, aliases: Aliases) -> Iterator[_Backward]:
    for dg in step.calling(aten.silu_backward.default, aten.gelu_backward.default):
        ds, gate = dg.args[:2]
        if activation_of(dg) is None or ds.target is not aten.mul.Tensor or only_user(ds) is not dg:
            continue
        for dh in sorted(ds.all_input_nodes, key=lambda n: -aliases.position[behind_reshapes(n)]):
            product, up, du = behind_reshapes(dh), other_input(ds, dh), next((n for n in dh.users if n is not ds), None)
            if product.target is not aten.mm.default or up is None or du is None or len(dh.users) > 2:
                continue
            act = other_input(du, dh) if du.target is aten.mul.Tensor else None
            if act is None or activation_of(act) != activation_of(dg) or not _one(act.args[0], gate):
                continue
            place = min(ds, du, key=aliases.position.__getitem__)
            first, last = aliases.position[product], aliases.position[dg]
            if (
                _alike(dg, dh, up, gate, du)
                and _read_once(product, dh)
                and all(aliases.position[n] < aliases.position[place] for n in (gate, up))
                and not any(aliases.written_between(n, first, last) for n in (*product.args, gate, up))
                and not aliases.written_between(act, aliases.position[act], aliases.position[du])
            ):
                yield _Backward(product, dg, dh, ds, du, place)
                break


def activation_of(node: fx.Node) -> str | None:
    """What the kernels call the activation that ``node`` computes, or whose gradient; None for others."""
    if node.target in (aten.silu.default, aten.silu_backward.default):
        return "silu"
    gelu = node.target in (aten.gelu.default, aten.gelu_backward.default)
    return "gelu_tanh" if gelu and argument(node, "approximate") == "tanh" else None


def _alike(*nodes: fx.Node) -> bool:
    """Whether all have one shape and dtype and are contiguous."""
    values = [node.meta["val"] for node in nodes]
    return all(
        isinstance(v, torch.Tensor) and (v.shape, v.dtype) == (values[0].shape, values[0].dtype) and v.is_contiguous()
        for v in values
    )


def _readers(product: fx.Node) -> Iterator[fx.Node]:
    """What reads ``product`` or a view of it; a view of a view is one of them."""
    for user in product.users:
        yield from user.users if user.target in RESHAPES else (user,)


def _one(a: fx.Node, b: fx.Node) -> bool:
    return behind_reshapes(a) is behind_reshapes(b)


def _read_once(product: fx.Node, view: fx.Node) -> bool:
    """Whether nothing reads ``product`` but the readers of ``view`` of it."""
    while view is not product:
        view = view.args[0]
        if len(view.users) != 1:
            return False
    return True

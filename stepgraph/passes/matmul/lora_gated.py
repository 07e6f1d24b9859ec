"""SwiGLU between linear layers with adapters, where the pass `lora` has found these: one operator forward and one
backward, which add and differentiate the adapters (`stepgraph.kernels.lora.gated`).

    h = silu(gate + s mul(t_g, B_g^T)) * (up + s mul(t_u, B_u^T)), t = mm(h, A^T)   ->  h, t = gated_adapters(...)
    dh = add(base, mm(dt, A)); its products with silu and up, silu_backward;
    mm(dt^T, h), and of gate and up mm(dy, B) and mm(dy^T, t)                    ->  gated_adapters_backward(...)

Preconditions: 16-bit tensors of one dtype, ranks that are equal and small, gradients of all adapters, no other reader
of what is left out, and no write to what is read or left out in between.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import RESHAPES, is_cast, is_mutating, only_user, other_input, swapped, upstream
from stepgraph.graph.order import readers
from stepgraph.kernels.lora.gated import LARGEST_RANK
from stepgraph.passes.matmul.lora_find import Adapter, hoist, overwritten

aten, ours = torch.ops.aten, torch.ops.stepgraph


class _Gated(NamedTuple):
    """``silu(gate) * up`` = ``h`` with the adapters of gate, up and the layer that reads h; in backward the sum
    ``dh``, what its product with the layer's frozen weight gives, and the gradients of gate and up."""

    gate: Adapter
    up: Adapter
    down: Adapter
    silu: fx.Node
    h: fx.Node
    dh: fx.Node
    base: fx.Node
    d_gate: fx.Node
    d_up: fx.Node


def fuse_gated(adapters: Sequence[Adapter], aliases: Aliases) -> int:
    """Replace each SwiGLU between ``adapters`` that fits; how many. ``adapters`` then describe what is left."""
    by_end = {adapter.end: adapter for adapter in adapters if adapter.addend is not None}
    by_input = {}
    for adapter in adapters:
        by_input.setdefault(aliases.root(adapter.down.forward.a.node), adapter)
    found = [_match(gate, by_end, by_input) for gate in by_end.values()]
    matches = [m for m in found if m is not None and _fits(m) and not _is_written(m, aliases)]
    for match in matches:
        _rewrite(match)
    return len(matches)


def _match(gate: Adapter, by_end: dict, by_input: dict) -> _Gated | None:
    silu = _reader(gate.end, aten.silu.default)
    d_gate = _reader(gate.end, aten.silu_backward.default)
    if silu is None or d_gate is None or len(gate.end.users) != 2 or len(silu.users) != 2:
        return None
    h = next((n for n in silu.users if n.target is aten.mul.Tensor and other_input(n, silu) in by_end), None)
    if h is None:
        return None
    up, down = by_end[other_input(h, silu)], by_input.get(h)
    d_up = next(n for n in silu.users if n is not h)
    if down is None or up is gate or len(up.end.users) != 2 or d_up.target is not aten.mul.Tensor:
        return None
    dh = other_input(d_up, silu)
    d_silu = next(n for n in up.end.users if n is not h)
    forms = d_silu.target is aten.mul.Tensor and other_input(d_silu, up.end) is dh and d_gate.args == (d_silu, gate.end)
    if not forms or only_user(d_silu) is not d_gate or set(dh.users) != {d_up, d_silu}:
        return None
    product = down.down.input_gradient
    top = None if product is None else product.node
    while top is not None and (user := only_user(top)) is not dh:
        top = user if user is not None and (user.target in RESHAPES or _is_exact(user, dh)) else None
    if top is None or dh.target is not aten.add.Tensor or dh.kwargs:
        return None
    return _Gated(gate, up, down, silu, h, dh, other_input(dh, top), d_gate, d_up)


def _is_exact(node: fx.Node, like: fx.Node) -> bool:
    """Whether the node casts to fp32, or back to the dtype of ``like``, as peft's casts under autocast do in backward:
    of a product in that dtype they change nothing."""
    return is_cast(node) and node.meta["val"].dtype in (torch.float32, like.meta["val"].dtype)


def _reader(node: fx.Node, target: object) -> fx.Node | None:
    return next((user for user in node.users if user.target is target), None)


def _weights(match: _Gated) -> list[fx.Node | None]:
    """B of gate and up, (N, r), and A of the layer that reads h, (r, N)."""
    products = match.gate.up.forward, match.up.up.forward, match.down.down.forward
    return [swapped(product.b.node) for product in products]


def _fits(match: _Gated) -> bool:
    """Whether the operators take these tensors, and give all gradients that are asked for."""
    last = match.down.down
    gradients = [match.gate.up.input_gradient, match.up.up.input_gradient, last.input_gradient]
    gradients += [layer.weight_gradient for layer in (match.gate.up, match.up.up, last)]
    weights = _weights(match)
    if None in gradients or None in weights or any(g.node.target is not aten.mm.default for g in gradients):
        return False
    *bs, a = (weight.meta["val"] for weight in weights)
    h = match.h.meta["val"]
    N, r = bs[0].shape
    forms = [(N, r), (N, r), (r, N)]
    dt = last.input_gradient.node.args[0]
    read = match.gate.addend, match.up.addend, match.base, dt, last.forward.node, last.input_gradient.node
    values = [n.meta["val"] for n in read]
    values += [adapter.up.forward.a.node.meta["val"] for adapter in match[:2]]
    fits = (
        h.dtype in (torch.bfloat16, torch.float16)
        and r <= LARGEST_RANK
        and [tuple(w.shape) for w in (*bs, a)] == forms
        and all(w.is_contiguous() for w in (*bs, a))
        and all(v.dtype == h.dtype for v in (*values, *bs, a))
        and all(v.is_contiguous() for v in values[:4])
        and all(v.shape == h.shape for v in values[:3])
        and [tuple(g.node.meta["val"].shape) for g in gradients[3:]] == forms
        and all(v.stride(1) == 1 for v in values[6:])
    )
    return fits and _are_theirs(match)


def _is_written(match: _Gated, aliases: Aliases) -> bool:
    """Whether what the operators read, compute again or leave out is written to from the first product with B to the
    last gradient, or what reads the gradient of A cannot come later."""
    gate, up, down, *_ = match
    place = min(match.dh.users)
    early = readers([down.down.weight_gradient.node], place)
    if any(is_mutating(node) or overwritten(node, place, aliases) for node in early):
        return True
    weights = _weights(match)
    firsts = [adapter.up.forward.node for adapter in (gate, up)]
    read = [gate.addend, up.addend, *(node.args[-2] for node in firsts), *weights, match.base]
    read += [down.down.input_gradient.node.args[0]]
    made = [match.h, match.dh, match.d_gate, match.d_up, down.down.forward.node, down.down.weight_gradient.node]
    made += [p.node for a in (gate, up) for p in (a.up.input_gradient, a.up.weight_gradient)]
    inside = {*read, *made}.union(*(upstream(node, {*read, *map(aliases.root, read)}) for node in made))
    inside = inside.union(*map(upstream, weights))
    positions = [aliases.position[node] for node in (*firsts, *made)]
    return any(aliases.written_between(node, min(positions), max(positions)) for node in inside)


def _are_theirs(match: _Gated) -> bool:
    """Whether the gradients of all weights are products of the gradients here."""
    for adapter, wide in ((match.gate, match.d_gate), (match.up, match.d_up)):
        products = adapter.up.input_gradient, adapter.up.weight_gradient
        if not all(_before(product.node.args[0], adapter.scale) is wide for product in products):
            return False
    dt, x = match.down.down.weight_gradient.node.args
    return swapped(dt) is match.down.down.input_gradient.node.args[0] and _before(x, 1.0) is match.h


def _before(node: fx.Node, scale: float) -> fx.Node | None:
    """What was multiplied by ``scale`` and seen in another shape, or transposed."""
    while True:
        if node.target in RESHAPES or node.target is aten.clone.default:
            node = node.args[0]
        elif (turned := swapped(node)) is not None:
            node = turned
        elif node.target is aten.mul.Tensor and node.args[1] == scale and scale != 1:
            node, scale = node.args[0], 1.0
        else:
            return node if scale == 1 else None


def _rewrite(match: _Gated) -> None:
    gate, up, down, silu, h, dh, base, d_gate, d_up = match
    weights = _weights(match)
    for weight in weights:
        hoist(weight, h)
    *bs, a = weights
    last = down.down
    t, dt, da = last.forward.node, last.input_gradient.node.args[0], last.weight_gradient.node
    build = Builder(silu, h, t, before=h)
    flat = (t.meta["val"].shape[0], h.meta["val"].shape[-1])
    read = [build.view(adapter.addend, flat) for adapter in (gate, up)]
    read += [adapter.up.forward.a.node for adapter in (gate, up)]
    h_made, t_made = build.parts(build(ours.gated_adapters.default, *read, *weights, gate.scale, up.scale))
    replace(h, build.view(h_made, h.meta["val"].shape))
    replace(t, t_made)
    last.forward = last.forward._replace(node=t_made)

    place = min(dh.users)
    early = readers([da], place)
    build = Builder(dh, d_gate, d_up, before=place)
    arguments = build.view(base, flat), *read, *bs, dt, a, gate.scale, up.scale
    made = build.parts(build(ours.gated_adapters_backward.default, *arguments))
    wides = [build.view(grad, dh.meta["val"].shape) for grad in made[:2]]
    for node in early:
        place.prepend(node)
    replace(da, made[6], sweep=True)
    last.input_gradient = last.weight_gradient = None
    for i, (adapter, wide) in enumerate(((gate, d_gate), (up, d_up))):
        replace(wide, wides[i])
        layer, adapter.why_not = adapter.up, ""
        for product, grad in ((layer.input_gradient, made[2 + i]), (layer.weight_gradient, made[4 + i])):
            replace(product.node, grad, sweep=True)
        layer.input_gradient = layer.input_gradient._replace(node=made[2 + i])
        layer.weight_gradient = layer.weight_gradient._replace(node=made[4 + i])
    erase_unread(silu, dh, *dh.users)

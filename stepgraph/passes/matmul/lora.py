"""Low-rank adapters: joined over layers of one input, and added by the products themselves.

Matches y = x W^T + s (x A^T) B^T, forward and backward, as `peft` and others write it. Before -> after:

    t_i = mm(x, A_i^T)                          ->  t = mm(x, [A_1; A_2; ...]^T), in columns    (layers that share x)
    y = add(mm(x, W^T), mul(mm(t_i, B^T), s))   ->  y = sum_products([t_i, x], [B^T, W^T], scale=s)
    dt_i = mm(mul(dy, s), B)                    ->  dt_i = sum_products([dy], [B], scale=s)
    dB = mm(mul(dy, s)^T, t_i)                  ->  dB = sum_products([dy^T], [t_i], scale=s)
    dA_i = mm(dt_i^T, x)                        ->  dA = mm([dt_1 dt_2 ...]^T, x), in rows      (layers that share x)
    dx = sum of mm(dt_i, A_i) and mm(dy_i, W_i) ->  dx = sum_products([dt, dy_1, ...], [A, W_1, ...])

So no elementwise operator passes over anything as large as y or x for an adapter, and x is read once for all of them.
The weights W may be of any form. Where the base layer is not a plain product (fp8), the adapter's product stays an
addend, and the rest holds.
Tier numerics: s is applied before rounding, dx is summed in the products' dtype. Preconditions: s is a number, and the
products have the dtype of y. With dropout each adapter reads an x of its own, and only the sums of forward are joined.
Source: Hu et al., "LoRA", 2021, section 4; the joins are own.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread, fake_value, replace
from stepgraph.graph.facts import RESHAPES, behind_reshapes, is_cast, is_mutating, only_user, swapped
from stepgraph.graph.order import readers
from stepgraph.graph.provenance import phase_of
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.matmul.layers import find
from stepgraph.passes.matmul.lora_find import (
    PRODUCTS,
    Adapter,
    find_adapters,
    has_chain,
    hoist,
    is_plain_sum,
    overwritten,
)
from stepgraph.passes.matmul.lora_gated import fuse_gated

aten, SUM = torch.ops.aten, torch.ops.stepgraph.sum_products.default


@dataclass(frozen=True)
class LoraOptions:
    """``gated``: SwiGLU between adapters by our operators; always on a GPU."""

    gated: bool = False


@register(
    "lora",
    "numerics",
    options=LoraOptions(),
    for_target=lambda options, target: replace_fields(options, gated=options.gated or target.device == "cuda"),
)
def lora(step: StepGraph, options: LoraOptions, report: PassReport) -> None:
    """Join the products of low-rank adapters of one input, and add them without passes over activations."""
    aliases = Aliases(step.graph)
    adapters = list(find_adapters(find(step, aliases).layers, aliases)) if has_chain(step) else []
    report.matched = len(adapters)
    groups = _groups(adapters, aliases)
    apart = sum(
        a.base is not None and aliases.root(a.base.args[-2]) is not aliases.root(a.down.forward.a.node)
        for a in adapters
    )
    settled = set(_settled(adapters, aliases))
    gated = fuse_gated(adapters, aliases) if options.gated else 0
    left: Counter[str] = Counter(adapter.why_not for adapter in adapters if adapter.why_not)
    joined = sum(_join_down(group) for group in groups)
    added = [adapter for adapter in adapters if adapter.why_not is None]
    for adapter in added:
        _add(adapter)
    scaled = [adapter for adapter in adapters if _scale_backward(adapter, settled)]
    sums = _sum_input_gradients(adapters, aliases)
    gradients = sum(_join_gradients(group, aliases) for group in groups)
    changed = {id(adapter) for adapter in (*added, *scaled)} | {id(a) for g in groups if len(g) > 1 for a in g}
    report.changed = len(changed)
    report.summary = (
        f"{len(added)} of {len(adapters)} adapters added by products; {joined} first products joined to "
        f"{sum(len(g) > 1 for g in groups)}, {gradients} of their weights' gradients joined; "
        f"{sum(sums)} products in {len(sums)} gradients of inputs"
        + (f"; {gated} SwiGLUs between adapters" if gated else "")
    )
    if apart:
        report.notes.append(f"{apart} adapters read another input than their base layer (dropout): not joined")
    report.notes += [f"{number} adapters added by an operator of their own: {why}" for why, number in left.items()]


def _groups(adapters: Sequence[Adapter], aliases: Aliases) -> list[list[Adapter]]:
    """Adapters by the input that they share, in order of forward; alone where other operators than products read t, as
    it would lie otherwise in memory, or where a weight is written to in between."""
    groups: dict[object, list[Adapter]] = defaultdict(list)
    for adapter in adapters:
        product = adapter.down.forward
        first = next(iter(groups[adapter.down.x]), adapter).down.forward.node
        joins = all(map(_multiplies, product.node.users)) and not _changed(product.b.node, first, product.node, aliases)
        groups[adapter.down.x if joins else product.node].append(adapter)
    return [group for group in groups.values() if group]


def _multiplies(reader: fx.Node) -> bool:
    """Whether ``reader`` is a product, or a transpose that only products read."""
    return all(user.target in PRODUCTS for user in (reader.users if swapped(reader) is not None else [reader]))


def _changed(node: fx.Node, first: fx.Node, last: fx.Node, aliases: Aliases) -> bool:
    """Whether ``node``, or what made it since ``first``, is written to between ``first`` and ``last``."""
    at = aliases.position
    if aliases.written_between(node, at[first], at[last]):
        return True
    return at[first] < at[node] and any(_changed(source, first, last, aliases) for source in node.all_input_nodes)


def _join_down(group: list[Adapter]) -> int:
    """One first product for all of ``group``; how many it takes the place of."""
    first, products = group[0].down.forward.node, [adapter.down.forward for adapter in group]
    if len(group) == 1:
        return 0
    for product in products:
        hoist(product.b.node, first)
    build = Builder(*(p.node for p in products), before=first)
    stacked = build(aten.cat.default, [swapped(p.b.node) or build(aten.t.default, p.b.node) for p in products])
    wide = build(aten.mm.default, products[0].a.node, build(aten.t.default, stacked))
    _split(wide, [p.node for p in products], 1, build)
    return len(group)


def _split(wide: fx.Node, parts: Sequence[fx.Node], dim: int, build: Builder) -> None:
    """Replace ``parts`` by slices of ``wide``, which has them side by side."""
    ends = list(itertools.accumulate(part.meta["val"].shape[dim] for part in parts))
    pieces = [
        build(aten.slice.Tensor, wide, dim, start, end, like=part)
        for part, start, end in zip(parts, (0, *ends), ends, strict=False)
    ]
    for part, piece in zip(parts, pieces, strict=True):
        replace(part, piece, sweep=True)
        for user in filter(swapped, piece.users):
            user.meta["val"] = fake_value(user)  # another layout in memory, which its readers, all products, allow


def _add(adapter: Adapter) -> None:
    """The products with B and with the base layer's weight as one sum."""
    base, up, end = adapter.base, adapter.up.forward.node, adapter.end
    bias, x, w = base.args if base.target is aten.addmm.default else (None, *base.args)
    build = Builder(base, up, end, before=end)
    t, b = up.args
    y = build(SUM, [t, x], [b, w], bias, adapter.scale)
    replace(end, build.view(y, end.meta["val"].shape), sweep=True)


def _scale_backward(adapter: Adapter, settled: set[fx.Node]) -> bool:
    """Leave the scale of the output's gradient to the products that read it."""
    done = False
    for product in (adapter.up.input_gradient, adapter.up.weight_gradient):
        if product is None or product.node not in settled:
            continue
        build = Builder(product.node, before=product.node)
        matrix, scaled = product.node.args[0], _scaled(product.node, adapter.scale)
        turned = matrix.target is aten.t.default
        shape = (matrix.args[0] if turned else matrix).meta["val"].shape
        dy = build.view(build.contiguous(scaled.args[0]), shape)
        new = build(SUM, [build(aten.t.default, dy) if turned else dy], [product.node.args[1]], None, adapter.scale)
        if product is adapter.up.input_gradient:
            adapter.up.input_gradient = product._replace(node=new)
        else:
            adapter.up.weight_gradient = product._replace(node=new)
        replace(product.node, new, sweep=True)
        done = True
    return done


def _settled(adapters: Sequence[Adapter], aliases: Aliases) -> Iterator[fx.Node]:
    """Products that read the scaled gradient of the output, if nothing writes to it or to its multiple before."""
    at = aliases.position
    for adapter in adapters:
        for product in (adapter.up.input_gradient, adapter.up.weight_gradient):
            node = None if product is None or product.node.target is not aten.mm.default else product.node
            scaled = None if node is None or adapter.scale == 1 else _scaled(node, adapter.scale)
            if scaled is not None and not any(
                aliases.written_between(read, at[scaled], at[node]) for read in (scaled, scaled.args[0])
            ):
                yield node


def _scaled(product: fx.Node, scale: float) -> fx.Node | None:
    """The multiplication by ``scale`` whose result, up to its shape, is the first matrix of ``product``; or None."""
    matrix = product.args[0]
    node = behind_reshapes(matrix.args[0] if matrix.target is aten.t.default else matrix)
    multiplied = node.target is aten.mul.Tensor and node.args[1] == scale
    return node if multiplied and node.meta["val"].dtype == _dtype(node.args[0]) else None


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _sum_input_gradients(adapters: Sequence[Adapter], aliases: Aliases) -> list[int]:
    """One sum of products for each gradient of an input that adapters take part in: how many products each has."""
    trees: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for adapter in adapters:
        product = adapter.down.input_gradient
        if product is not None and product.node.target is aten.mm.default and (root := _root(product.node)):
            trees[root].append(product.node)
    found = []
    for root, downs in trees.items():
        leaves = sorted(_leaves(root))
        downs = [leaf for leaf in leaves if leaf in downs]
        kinds = {(n.meta["val"].shape, n.meta["val"].dtype) for n in leaves}
        if not downs or len(leaves) < 2 or len(kinds) > 1:
            continue
        if any(overwritten(leaf, leaves[-1], aliases) for leaf in leaves[:-1]):
            continue
        found.append(len(leaves))
        last, products = leaves[-1], [leaf.args for leaf in leaves if leaf not in downs]
        build = Builder(*leaves, before=last)
        if len(downs) > 1:
            stacked = build(aten.cat.default, [n.args[1] for n in downs])
            products.insert(0, (_side_by_side([n.args[0] for n in downs]), stacked))
        else:
            products.insert(0, downs[0].args)
        total = build(SUM, *map(list, zip(*products, strict=True)))
        for leaf in leaves[:-1]:
            _drop(leaf)
        replace(last, total, sweep=True)
    return found


def _side_by_side(parts: list[fx.Node]) -> fx.Node:
    """Matrices joined in columns, once, after the last of them."""
    known = [user for user in parts[0].users if user.target is aten.cat.default and user.args == (parts, 1)]
    return known[0] if known else Builder(*parts, after=max(parts))(aten.cat.default, parts, 1)


def _summand(node: fx.Node) -> fx.Node | None:
    """The sum that is the only reader of ``node``, viewed and cast at most."""
    while (user := only_user(node)) is not None and (user.target in RESHAPES or is_cast(user)):
        node = user
    return user if user is not None and user.target is aten.add.Tensor and is_plain_sum(user) else None


def _root(leaf: fx.Node) -> fx.Node | None:
    """The last of the sums that ``leaf`` goes into."""
    root, node = None, _summand(leaf)
    while node is not None and phase_of(node) == "backward":
        root, node = node, _summand(node)
    return root


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    """The products of two matrices among the summands of the sum ``node``; none where a summand's layout in memory
    differs from the sum's, since the sum without its products could then have another one."""
    if any(summand.meta["val"].stride() != node.meta["val"].stride() for summand in node.args):
        return
    for summand in node.args:
        while (summand.target in RESHAPES or is_cast(summand)) and only_user(summand) is not None:
            summand = summand.args[0]
        if only_user(summand) is None:
            continue
        if summand.target is aten.add.Tensor and is_plain_sum(summand):
            yield from _leaves(summand)
        elif summand.target is aten.mm.default:
            yield summand


def _drop(leaf: fx.Node) -> None:
    """Take ``leaf`` out of the sum that it is a summand of."""
    top = leaf
    while (user := only_user(top)).target is not aten.add.Tensor:
        top = user
    other = user.args[1] if user.args[0] is top else user.args[0]
    replace(user, Builder(user, before=user).cast(other, _dtype(user)))
    erase_unread(top)


def _join_gradients(group: list[Adapter], aliases: Aliases) -> int:
    """One product for the gradients of the first weights of ``group``; how many it takes the place of."""
    products = sorted(
        adapter.down.weight_gradient.node
        for adapter in group
        if (found := adapter.down.weight_gradient) is not None
        and found.node.target is aten.mm.default
        and found.node.args[0].target is aten.t.default  # dt^T x, as of nn.Linear
        and found.b.matrix == adapter.down.x
    )
    if len(products) < 2:
        return 0
    last = products[-1]
    early = readers(products[:-1], last)
    if any(is_mutating(node) for node in early) or any(overwritten(p, last, aliases) for p in products):
        return 0
    place, build = last.next, Builder(*products, before=last.next)
    parts = [product.args[0].args[0] for product in products]
    wide = build(aten.mm.default, build(aten.t.default, _side_by_side(parts)), last.args[1])
    _split(wide, products, 0, build)
    for node in early:
        place.prepend(node)
    return len(products)

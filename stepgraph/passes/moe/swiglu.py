"""SwiGLU of the expert rows, forward and backward, by kernels that work only on the rows in use.

Matches, between grouped products of the same ``offsets``: the two halves of one product's rows, as ``split`` or slices
give them, and in backward a product ``dh`` of ``h``'s width.

    h = silu(gate) * up                                     ->  h = swiglu_rows(gate_up, offsets)
    cat([silu_backward(dh * up, gate), dh * silu(gate)])    ->  swiglu_rows_backward(dh, gate_up, offsets)

Or, with slices, the sum of both gradients, each padded to both halves by ``slice_backward``.

Before, Inductor computes the two halves of ``cat`` by a branch each and so reads dh, gate and up twice; and rows that
belong to no expert, in buffers that hold those of other ranks, cost what the others do. After, each is read once, where
an expert has the row. Kept for backward are gate and up side by side, as before, and not silu.
Tier numerics: roundings are eager's, not those of kernels that Inductor would make. Preconditions: grouped products
alone read ``h`` and the gradients, so nothing else sees rows past the end; nothing else reads the halves or silu.
Where experts are weighted before their last product (`weight_experts`), other operators read ``h``: those stay.
Source: own.
"""

from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, replace
from stepgraph.graph.facts import argument, getitem_users, only_user, other_input
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCT, _WEIGHT_PRODUCT = ours.grouped_mm.default, ours.grouped_mm_weight.default
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


class _Found(NamedTuple):
    """Nodes of one match: the product of gate and up, what is computed of it, and in backward the gradient of ``h``,
    that of ``silu(gate)``'s argument, that of ``up``, and both as one. Without a backward the last four are None."""

    gate_up: fx.Node
    silu: fx.Node
    h: fx.Node
    dh: fx.Node | None = None
    dgate: fx.Node | None = None
    dup: fx.Node | None = None
    both: fx.Node | None = None


@register("expert_swiglu", "numerics", after=("fuse_experts", "weight_experts"), needs_cuda=True)
def expert_swiglu(step: StepGraph, options: object, report: PassReport) -> None:
    """Compute the SwiGLU of expert rows, forward and backward, only for the rows in use."""
    for product in step.calling(_PRODUCT):
        halves = _halves(product)
        h = None if halves is None else _gated(*halves)
        if h is None or not any(_reads_rows(user, h, product.args[2]) for user in h.users):
            continue
        found = _match(product, *halves, h)
        if report.takes(found, h):
            _rewrite(found)
    report.summary = f"{report.changed} of {report.matched} SwiGLUs of expert rows in our kernels"


def _halves(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The first and the second half of the product's columns, where all its readers take one of them."""
    width = product.meta["val"].shape[1]
    user = only_user(product)
    if user is not None and user.target in _SPLITS:
        parts = getitem_users(user)
        halved = [part.shape[1] for part in user.meta["val"]] == [width // 2] * 2 and width % 2 == 0
        return (parts[0], parts[1]) if halved and len(parts) == len(user.users) == 2 else None
    if len(product.users) != 2 or any(n.target is not aten.slice.Tensor for n in product.users):
        return None
    begins = {_begin(n, width): n for n in product.users}
    return (begins[0], begins[width // 2]) if begins.keys() == {0, width // 2} and width % 2 == 0 else None


def _begin(node: fx.Node, width: int) -> int | None:
    """The column that a slice of half the columns begins at, or None; of ``slice_backward`` likewise."""
    dim, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    if dim not in (1, -1) or step != 1 or not all(isinstance(at, int | None) for at in (start, end)):
        return None
    start, end, _ = slice(start, end).indices(width)
    return start if end - start == width // 2 else None


def _gated(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """``silu(gate) * up``, if there is one."""
    for silu in gate.users:
        for user in silu.users if silu.target is aten.silu.default else ():
            if _multiplies(user, silu, up):
                return user
    return None


def _multiplies(node: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and node.args in ((a, b), (b, a)) and not node.kwargs


def _reads_rows(node: fx.Node, rows: fx.Node, offsets: fx.Node) -> bool:
    """Whether ``node`` is a grouped product that reads ``rows`` as rows up to the last of ``offsets``."""
    if node.target is _PRODUCT:
        return node.args[0] is rows and node.args[1] is not rows and node.args[2] is offsets
    return node.target is _WEIGHT_PRODUCT and rows in node.args[:2] and node.args[2] is offsets


def _match(product: fx.Node, gate: fx.Node, up: fx.Node, h: fx.Node) -> _Found | str:
    """What to rewrite, or why it cannot be."""
    offsets = product.args[2]
    silu = next(n for n in h.args if n.target is aten.silu.default)
    if not all(_reads_rows(user, h, offsets) for user in h.users):
        return "something other than grouped products reads it"
    behind = [n for n in (*gate.users, *up.users, *silu.users) if n not in (silu, h)]
    if not behind:
        return _Found(product, silu, h)  # no gradient is asked for
    dgates = [n for n in gate.users if n.target is aten.silu_backward.default and n.args[1] is gate]
    dups = [n for n in silu.users if n is not h]
    products = [n for n in up.users if n is not h]
    if not (len(dgates) == len(dups) == len(products) == 1) or len(behind) != 3:
        return "something else reads gate, up or silu"
    (dgate,), (dup,), (dsilu,) = dgates, dups, products
    dh = other_input(dup, silu)
    if dh is None or not _multiplies(dup, dh, silu) or not _multiplies(dsilu, dh, up):
        return "its gradient is of a different form"
    if dgate.args[0] is not dsilu or list(dsilu.users) != [dgate] or dh.meta["val"].dtype != h.meta["val"].dtype:
        return "its gradient is of a different form"
    both = _joined(dgate, dup, product.meta["val"].shape[1])
    if both is None:
        return "its gradients are not put side by side"
    if not all(_reads_rows(user, both, offsets) for user in both.users):
        return "something other than grouped products reads its gradients"
    return _Found(product, silu, h, dh, dgate, dup, both)


def _joined(dgate: fx.Node, dup: fx.Node, width: int) -> fx.Node | None:
    """The gradients side by side, where nothing else reads them."""
    first, second = only_user(dgate), only_user(dup)
    if first is None or second is None:
        return None
    if first is second and first.target is aten.cat.default:
        return first if first.args[0] == [dgate, dup] and argument(first, "dim") in (1, -1) else None
    if any(n.target is not aten.slice_backward.default for n in (first, second)):
        return None
    both = only_user(first)
    added = both is not None and both is only_user(second) and both.target is aten.add.Tensor and not both.kwargs
    return both if added and (_begin(first, width), _begin(second, width)) == (0, width // 2) else None


def _rewrite(found: _Found) -> None:
    gate_up, silu, h = found[:3]
    offsets = gate_up.args[2]
    replace(h, Builder(silu, h, before=h)(ours.swiglu_rows.default, gate_up, offsets))
    gradients = []
    if found.both is not None:
        gradients = found.both.all_input_nodes
        build = Builder(found.dgate, found.dup, found.both, before=found.both)
        replace(found.both, build(ours.swiglu_rows_backward.default, found.dh, gate_up, offsets))
    erase_unread(*gradients, silu)

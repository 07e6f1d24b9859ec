"""Attention that multiplies values by transposed weights, as in channels-first layouts.

    out = v w'   ->   (w v')'         v (N, D, S), w (N, T, S); and in backward, with the gradient ``dout`` of ``out``,
    dv = dout w  ->   (w' dout')'
    dw' = v' dout  -> dw = dout' v

Diffusion U-Nets, VQGAN and SAGAN write it this way; `fuse` matches the form on the right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, take_place
from stepgraph.graph.facts import is_cast, packet

aten = torch.ops.aten

_MOVES = (aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze)


@dataclass
class Columns:
    """The products of an attention whose weights, those of ``softmax``, are read transposed. In backward, if there is
    one: ``dv``, and ``dw``, transposed, that ``slope``, the backward of the softmax, reads."""

    softmax: fx.Node
    out: fx.Node
    dv: fx.Node | None = None
    slope: fx.Node | None = None
    dw: fx.Node | None = None

    def rewrite(self) -> None:
        """Put the same products of untransposed weights in their place."""
        v, shape = self.out.args[0], self.out.args[1].meta["val"].mT.shape
        build = Builder(self.out, before=self.out)
        weights = build.view(build.cast(self.softmax, v.meta["val"].dtype), shape)
        across = build(aten.transpose.int, v, 1, 2)
        take_place(self.out, build(aten.transpose.int, build(aten.bmm.default, weights, across), 1, 2))
        dout = next((node.args[i] for node, i in ((self.dv, 0), (self.dw, 1)) if node is not None), None)
        turned = dout and Builder(dout, after=dout)(aten.transpose.int, dout, 1, 2)
        if self.dv is not None:
            build = Builder(self.dv, before=self.dv)
            product = build(aten.bmm.default, build(aten.transpose.int, weights, 1, 2), turned)
            take_place(self.dv, build(aten.transpose.int, product, 1, 2))
        old = [self.out, self.dv]
        if self.slope is not None:
            old.append(self.slope.args[0])
            build, value = Builder(self.dw, before=self.slope), self.slope.args[0].meta["val"]
            product = build(aten.bmm.default, turned, v)
            self.slope.update_arg(0, build.cast(build.view(product, value.shape), value.dtype))
        erase_unread(*(node for node in old if node is not None))


def columns(softmax: fx.Node) -> Columns | None:
    """The attention around ``softmax``, if it reads its weights transposed."""
    outs, dvs = [], []
    for product, read in _products(softmax):
        left, right = product.args[0].meta["val"], product.args[1].meta["val"]
        if product.args[1] is not read or product.args[0] is read or _is_turned(read, softmax) is None:
            return None
        (outs if _is_turned(read, softmax) else dvs).append(product)
        if left.dtype != right.dtype:
            return None
    if len(outs) != 1 or len(dvs) > 1:
        return None
    found = Columns(softmax, outs[0], dvs[0] if dvs else None)
    slopes = [user for user in softmax.users if packet(user) is aten._softmax_backward_data and user.args[1] is softmax]
    if slopes:
        node = slopes[0].args[0]
        while packet(node) in _MOVES or is_cast(node):
            node = node.args[0]
        (*_, T, S), value = softmax.meta["val"].shape, slopes[0].args[0].meta["val"]
        if packet(node) is not aten.bmm or (*value.shape[-2:], *value.stride()[-2:]) != (T, S, 1, T):
            return None
        found.slope, found.dw = slopes[0], node
    if found.dv is not None and found.dw is not None and found.dv.args[0] is not found.dw.args[1]:
        return None
    return found


def _products(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(product, which operand comes from ``node`` by casts and views)."""
    for user in node.users:
        if packet(user) in _MOVES or is_cast(user):
            yield from _products(user)
        elif packet(user) is aten.bmm:
            yield user, node


def _is_turned(node: fx.Node, softmax: fx.Node) -> bool | None:
    """Whether ``node``, the contiguous ``softmax`` but for views and casts, has queries as columns; None where it has
    keys as neither rows nor columns."""
    *_, T, S = softmax.meta["val"].shape
    value = node.meta["val"]
    if min(T, S) == 1 or not softmax.meta["val"].is_contiguous():
        return None
    by_rows = (*value.shape[-2:], *value.stride()[-2:])
    return {(S, T, 1, S): True, (T, S, S, 1): False}.get(by_rows)

"""Losses of classes, spelled by the label's log-probability of each token, which `tokens` matches.

Matches: what reads the logits z (..., V): ``_log_softmax`` and ``_softmax``, ``logsumexp`` and ``argmax``, in whatever
shape, also where the classes were moved in front of tokens; and ``nll_loss_forward`` and ``nll_loss2d_forward`` with
their backward. Before -> after:

    log_softmax(reshaped(z))          ->  reshaped(log_softmax(z)), so that all read one z
    nll_loss(logs, labels, weight)    ->  -sum(weight[labels] * gather(logs, labels)) / sum(weight[labels])
    nll_loss_backward(g, ...)         ->  scatter_add(zeros, labels, -g * weight[labels] / sum)

with 0 for labels that are left out. Worth it only where `tokens` then matches: the scattered zeros have z's size.
"""

import math
from collections.abc import Iterator

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, is_cast, permutation
from stepgraph.passes.loss.head import MEAN, NONE, RESHAPES, SAME, readers
from stepgraph.passes.loss.tokens import BACKWARDS, SOFTMAXES

aten = torch.ops.aten

_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARDS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_MOVES = (aten.transpose.int, aten.permute.default)
_OF_ROWS = (aten.logsumexp.default, aten.argmax.default)


def spell(start: fx.Node) -> fx.Node:
    """Spell what reads the logits of ``start``, a softmax or ``logsumexp``; who reads these logits then."""
    z = start.args[0]
    at = (start.args[1] if start.target in SOFTMAXES else start.args[1][0]) % len(_shape(z))
    while (before := _classes_before(z, at)) is not None:
        z, at = z.args[0], before
    if at != len(_shape(z)) - 1:
        return start
    for user, dims in list(_behind(z, at)):
        if user.target in SOFTMAXES and user.args[1] % len(_shape(user)) == dims and user.args[0] is not z:
            _hoist(user, z, dims)
    for user in [user for user in readers(z) if user.target in SOFTMAXES]:
        for loss in [reader for reader in _readers_in_fp32(user, at) if reader.target in _LOSSES]:
            _gather(user, loss)
    _join(z)
    return next(user for user in readers(z) if user.target in (*SOFTMAXES, aten.logsumexp.default))


def _shape(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def _classes_at(view: fx.Node, at: int) -> int | None:
    """The dimension of the classes in ``view``, whose argument has them in ``at``, if the tokens keep their order."""
    if view.target not in (*_MOVES, *RESHAPES):
        return None
    before, after = _shape(view.args[0]), _shape(view)
    if view.target in _MOVES:
        order = permutation(view)
        rest = [d for d in order if d != at]
        return order.index(at) if rest == sorted(rest) else None
    sides = math.prod(before[:at]), before[at], math.prod(before[at + 1 :])
    found = ((math.prod(after[:j]), after[j], math.prod(after[j + 1 :])) for j in range(len(after)))
    return next((j for j, there in enumerate(found) if there == sides), None)


def _classes_before(view: fx.Node, at: int) -> int | None:
    """The dimension of the classes in the argument of ``view``, which has them in ``at``; None for another node."""
    if view.target not in (*_MOVES, *RESHAPES):
        return None
    return next((i for i in range(len(_shape(view.args[0]))) if _classes_at(view, i) == at), None)


def _keeps_last(node: fx.Node) -> bool:
    """Whether ``node`` is a view that keeps the classes as the last dimension."""
    before = _classes_before(node, len(_shape(node)) - 1)
    return before is not None and before == len(_shape(node.args[0])) - 1


def _behind(node: fx.Node, at: int) -> Iterator[tuple[fx.Node, int]]:
    """Who reads ``node``, which has the classes in ``at``, directly or in another shape, and where they are there."""
    for user in node.users:
        there = _classes_at(user, at)
        yield from ((user, at),) if there is None else _behind(user, there)


def _readers_in_fp32(softmax: fx.Node, at: int) -> Iterator[fx.Node]:
    """Who reads ``softmax``, which has the classes in ``at``, also where autocast casts it for its readers."""
    for user, there in _behind(softmax, at):
        yield from _readers_in_fp32(user, there) if is_cast(user) else (user,)


def _last(build: Builder, node: fx.Node, at: int, shape: torch.Size) -> fx.Node:
    """``node`` with the classes moved behind the tokens, in ``shape``."""
    rank = len(_shape(node))
    if at != rank - 1:
        node = build(aten.permute.default, node, [*range(at), *range(at + 1, rank), at])
    if not node.meta["val"].is_contiguous() and _shape(node) != shape:
        node = build.copy(node)
    return build.view(node, shape)


def _take_places(old: fx.Node, new: fx.Node, at: int) -> None:
    """Put ``new``, with the classes last, where ``old`` with those in ``at`` is read."""
    if at == len(_shape(old)) - 1:
        old.replace_all_uses_with(Builder(old, before=old).view(new, _shape(old)))
        return
    for user in list(old.users):
        if (there := _classes_at(user, at)) is not None:
            _take_places(user, new, there)
            if not user.users:
                user.graph.erase_node(user)
    if old.users:
        build, rank = Builder(old, before=old), len(_shape(old))
        moved = build.view(new, torch.Size([*_shape(old)[:at], *_shape(old)[at + 1 :], _shape(old)[at]]))
        old.replace_all_uses_with(build(aten.permute.default, moved, [*range(at), rank - 1, *range(at, rank - 1)]))


def _hoist(softmax: fx.Node, z: fx.Node, at: int) -> None:
    """Take the softmax of ``z`` itself, and of its backward."""
    new = Builder(softmax, before=softmax)(softmax.target, z, len(_shape(z)) - 1, *softmax.args[2:])
    for last in [user for user in readers(softmax) if user.target in BACKWARDS]:
        build = Builder(last, before=last)
        slope = _last(build, last.args[0], at, _shape(z))
        _take_places(last, build(last.target, slope, new, len(_shape(z)) - 1, *last.args[3:]), at)
        erase_unread(last)
    for name in [user for user in softmax.users if user.target in SAME]:
        name.replace_all_uses_with(softmax)
    _take_places(softmax, new, at)
    erase_unread(softmax)


def _gather(softmax: fx.Node, loss: fx.Node) -> None:
    """Spell ``loss``, of the log-probabilities ``softmax``, and its backward."""
    _, target, weight, reduction, ignore = loss.args
    lead, columns = _shape(softmax)[:-1], _shape(softmax)[-1]
    if target.meta["val"].numel() != math.prod(lead):
        return
    build = Builder(loss, before=loss)
    labels = _last(build, target, len(_shape(target)) - 1, torch.Size([*lead, 1]))
    counts = build(aten.ne.Scalar, labels, ignore)
    index = build(aten.mul.Tensor, labels, counts)
    picked = build.cast(build(aten.gather.default, softmax, len(lead), index), loss.args[0].meta["val"].dtype)
    share = build.cast(counts, picked.meta["val"].dtype)
    if weight is not None:
        share = build(aten.mul.Tensor, build(aten.index.Tensor, weight, [index]), share)

    def weighted(build: Builder, values: fx.Node) -> fx.Node:
        values = build(aten.where.ScalarOther, counts, build(aten.neg.default, values), 0.0)
        return values if weight is None else build(aten.mul.Tensor, values, share)

    total, value = build(aten.sum.default, share), weighted(build, picked)
    if reduction != NONE:
        value = build(aten.sum.default, value)
    if reduction == MEAN:
        value = build(aten.div.Tensor, value, total)
    for i, old in getitem_users(loss).items():
        old.replace_all_uses_with(total if i else build.view(value, _shape(old)))
    for back in [user for user in _readers_in_fp32(softmax, len(lead)) if user.target in _BACKWARDS]:
        if [*map(_constant, back.args[2:6])] != [*map(_constant, loss.args[1:5])]:
            continue
        build, slope = Builder(back, before=back), back.args[0]
        if reduction == NONE:
            slope = _last(build, slope, len(_shape(slope)) - 1, torch.Size([*lead, 1]))
        elif reduction == MEAN:
            slope = build(aten.div.Tensor, slope, total)
        slope = weighted(build, slope)
        zeros = build(aten.new_zeros.default, slope, [*lead, columns])
        _take_places(back, build(aten.scatter_add.default, zeros, len(lead), index, slope), 1)
        erase_unread(back)
    erase_unread(*getitem_users(loss).values())


def _constant(arg: object) -> object:
    """``arg``, or the name of the constant that it is: a graph may have a node for each reader."""
    return arg.target if isinstance(arg, fx.Node) and arg.op == "get_attr" else arg


def _join(z: fx.Node) -> None:
    """Let ``logsumexp`` and ``argmax`` of ``z`` in another shape, or before its casts, read ``z`` itself."""
    sources = [z]
    while is_cast(z) or _keeps_last(z):
        z = z.args[0]
        sources.append(z)
    for source in sources:
        for user, at in list(_behind(source, len(_shape(source)) - 1)):
            dims = user.args[1:2] if user.target in _OF_ROWS else ()
            if dims and user > sources[0] and user.args[0] is not sources[0]:
                own = dims[0] if isinstance(dims[0], int) else dims[0][0]
                if own % len(_shape(user.args[0])) == at:
                    build, last = Builder(user, before=user), len(_shape(sources[0])) - 1
                    new = build(user.target, sources[0], last if user.target is aten.argmax.default else [last])
                    user.replace_all_uses_with(build.view(new, _shape(user)))
                    erase_unread(user)

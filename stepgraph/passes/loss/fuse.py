"""The cross entropy and its gradient as one operator that writes the gradient over the logits.

Matches: ``_log_softmax`` of a (M, V) tensor read only by ``nll_loss_forward`` and by the backward of that same loss,
where the gradient that comes in does not depend on the loss's value. Before -> after: cast, log softmax, loss, loss
backward, softmax backward, cast back -> ``stepgraph::cross_entropy_(logits)``. Where ranks share the
vocabulary (tensor parallelism), see `split`; for log-probabilities of labels, entropies and divergences of two models,
as in DPO, GRPO and distillation, see `tokens`; for both of the same logits, `apart`; for other losses of classes (with
weights, smoothed labels, a z-loss, metrics of the logits, or shifted logits) `labels`, which takes two kernels.
Tier numerics: the kernel sums in another order, and its result is rounded once. Preconditions: a CUDA GPU, class
indices as targets.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

import stepgraph.kernels.loss.cross_entropy  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import factor_of, getitem_users, is_cast, is_pure, is_view, only_user, tensor_bytes
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.loss import apart, chunk, labels, split, tokens
from stepgraph.passes.loss.head import DTYPES, MEAN, NONE, RESHAPES, Head, readers

aten = torch.ops.aten
#: Times the bytes of a part that the logits of other losses may have: their parts cost another product, and unfused
#: they need more than this many tensors in bf16.
_UNFUSED = 4


@dataclass(frozen=True)
class LossOptions:
    """``chunks``: the parts that a head and its loss are computed in, one after another (see `chunk`). auto: as many as
    keep a part's logits near ``part_bytes``, in parts of at least 2048 rows. ``rows``: all are multiplied, or the ones
    that count; auto is all, and a capture may choose (`runner.for_labels`)."""

    chunks: chunk.Chunks = "auto"
    rows: Literal["auto", "all", "counted"] = "auto"
    part_bytes: int = chunk.PART_BYTES

    def __post_init__(self) -> None:
        chunk.check_chunks(self.chunks)


@register(
    "fuse_loss",
    "numerics",
    options=LossOptions(),
    needs_cuda=True,
    from_options=lambda options: {"chunks": options.loss_chunks, "rows": options.loss_rows},
)
def fuse_loss(step: StepGraph, options: LossOptions, report: PassReport) -> None:
    """Compute the cross entropy and its gradient in one kernel, over the logits; in two where ranks share them."""
    entropies, fused, saved, heads = 0, 0, 0, _apart(step.graph, options, report)
    firsts = {node for node in step.graph.nodes if node.target in _FIRST}
    while (node := next((n for n in step.graph.nodes if n in firsts), None)) is not None:
        firsts.remove(node)
        aliases = Aliases(step.graph)
        found, options_here = None, options
        if node.target in _OF_LOGITS:
            found = tokens.match(node, aliases)
            alone = found is None and node.target is aten.logsumexp.default  # as of a router; trying is not cheap
            plain = _match(node, aliases) if found is None and not alone else None
            if not (alone or isinstance(found, tokens.TokenHead) or _is_lean(plain, options)) and _can_be_spelled(node):
                found, plain = tokens.match(labels.spell(node), Aliases(step.graph)), None
                options_here = replace(options, part_bytes=_UNFUSED * options.part_bytes)
            if found is not None:
                heads += _in_parts(node, found, options_here, report)
                firsts -= found.softmaxes if isinstance(found, tokens.TokenHead) else set()
                continue
            found = plain
        else:
            found = split.match(node, aliases)
        if found is None:
            continue
        entropies += 1
        if isinstance(found, str):
            report.notes.append(f"{node.name} is left unchanged: {found}")
            continue
        loss = found.rewrite(aliases)
        if loss is not None:
            heads += chunk.rewrite(loss, options.chunks, report, options.part_bytes, options.rows == "counted")
        fused += 1
        saved += tensor_bytes(found.logits) if found.private else 0
    report.matched, report.changed = report.matched + entropies, report.changed + fused
    what = f"{fused} of {entropies} cross entropies" if entropies else "no cross entropy found to be"
    report.summary = (
        f"{what} computed with the gradient, {saved / 2**20:.0f} MiB of gradients written over logits{heads}"
    )


def _apart(graph: fx.Graph, options: LossOptions, report: PassReport) -> str:
    """Make a head for each loss of those whose logits several read, if all are then rewritten; what was done."""
    several = {
        product: taken
        for product, taken in apart.shared(graph).items()
        if chunk.parts(Head(product, product), options.chunks, options.part_bytes) > 1
    }
    if len(several) > 1 and _separable(graph, several) is None:  # heads that learn from each other go together
        tried = [several]
    else:
        tried = []
        for product, taken in several.items():
            if (reason := _separable(graph, {product: taken})) is None:
                tried.append({product: taken})
            else:
                report.notes.append(f"{product.name}, whose logits {len(taken)} losses read, stays one head: {reason}")
    made = [len(apart.separate(taken)) for some in tried for taken in some.values()]
    return f"; {len(made)} heads made {sum(made)}, one for each of their losses" if made else ""


def _separable(graph: fx.Graph, several: dict[fx.Node, list[fx.Node]]) -> str | None:
    """Why losses of the same logits cannot all be rewritten once each has a head of its own, tried on a copy."""
    copied: dict[fx.Node, fx.Node] = {}
    trial, firsts = fx.Graph(), []
    trial.output(trial.graph_copy(graph, copied))
    for taken in several.values():
        found = apart.separate([copied[node] for node in taken])
        if isinstance(found, str):
            return found
        firsts += found
    aliases = Aliases(trial)
    losses = [tokens.match(node, aliases) or _match(node, aliases) for node in firsts]
    return next((loss for loss in losses if isinstance(loss, str)), None)


def _is_lean(loss: "_Loss | str | None", options: LossOptions) -> bool:
    """Whether ``loss`` overwrites the logits themselves, or can be put in parts, in which they exist only once."""
    if not isinstance(loss, _Loss) or not loss.private:
        return False
    node, plain = loss.logits, True
    while node.target not in tokens.PRODUCTS:
        if node.target is aten.slice.Tensor:
            return False
        if factor_of(node) or is_cast(node):
            plain = False
        elif node.target not in (*RESHAPES, aten.clone.default):
            return True
        node = node.args[0]
    return plain or chunk.parts(Head(node, node), options.chunks, options.part_bytes) > 1


def _can_be_spelled(start: fx.Node) -> bool:
    """Whether `tokens` matches once `labels` has spelled what reads the logits of ``start``, tried on a copy."""
    copied: dict[fx.Node, fx.Node] = {}
    trial = fx.Graph()
    trial.output(trial.graph_copy(start.graph, copied))
    return isinstance(tokens.match(labels.spell(copied[start]), Aliases(trial)), tokens.TokenHead)


def _in_parts(softmax: fx.Node, found: tokens.TokenHead | str, options: LossOptions, report: PassReport) -> str:
    """Rewrite what is read of the probabilities of tokens; what was done, for the summary."""
    report.matched += 1
    if isinstance(found, str):
        gathered = any(user.target is aten.gather.default for user in readers(softmax))
        what = "labels are gathered" if gathered else "probabilities are summed"
        report.notes.append(f"{softmax.name}, of which {what}, is left unchanged: {found}")
        return ""
    bounds, each = chunk.bounds_of(found.rows, chunk.parts(found.head, options.chunks, options.part_bytes, found.rows))
    found.rewrite(bounds)
    report.changed += 1
    several = f"{len(bounds)} parts of {each} rows" if len(bounds) > 1 else "one part"
    return f"; {found.what} of {found.rows} x {found.head.shape[1]} logits in {several}"


@dataclass
class _Loss:
    """The nodes of one loss. ``logits``: before the cast to fp32 and the soft cap ``cap``, 0 for none. ``gradient``:
    that of the logits, after the cast back. ``private``: nothing else reads the logits, and their rows are
    contiguous."""

    logits: fx.Node
    softmax: fx.Node
    forward: fx.Node
    backward: fx.Node
    gradient: fx.Node
    cap: float
    private: bool

    def rewrite(self, aliases: Aliases) -> fx.Node:
        """Put the operator in their place."""
        _, targets, _, reduction, ignore = self.forward.args
        before = getitem_users(self.forward)[0]
        build, logits = Builder(self.forward, before=self.forward), self.logits
        if not self.private:
            logits = build.copy(logits)
        logits = build.view(logits, self.softmax.meta["val"].shape)
        grad = build.cast(self._early(self.backward.args[0], build, aliases.position), torch.float32)
        given = logits, targets, grad, reduction == MEAN, ignore, False, self.cap
        loss = build(torch.ops.stepgraph.cross_entropy_.default, *given)
        before.replace_all_uses_with(build.cast(loss, before.meta["val"].dtype))
        self.gradient.replace_all_uses_with(build.view(logits, self.gradient.meta["val"].shape))
        erase_unread(*getitem_users(self.forward).values(), self.gradient)
        return loss

    def _early(self, grad: fx.Node, build: Builder, position: dict[fx.Node, int]) -> fx.Node:
        """``grad``, computed before the loss is."""
        if grad.target is aten.ones_like.default and position[grad] > position[self.forward]:
            value = grad.meta["val"]
            return build(aten.full.default, list(value.shape), 1.0, dtype=value.dtype, device=value.device)
        if position[grad] < position[self.forward]:
            return grad
        args, kwargs = fx.map_arg((grad.args, grad.kwargs), lambda n: self._early(n, build, position))
        return build(grad.target, *args, **kwargs)


def _match(softmax: fx.Node, aliases: Aliases) -> _Loss | str:
    """The loss around ``softmax``, or why it cannot be rewritten."""
    found = list(readers(softmax))
    for cast in filter(is_cast, list(found)):  # on a GPU autocast puts one before nll_loss alone
        found.remove(cast)
        found += readers(cast)
    by_target = {user.target: user for user in found}
    forward, backward = by_target.get(aten.nll_loss_forward.default), by_target.get(aten.nll_loss_backward.default)
    last = by_target.get(aten._log_softmax_backward_data.default)
    if not (forward and backward and last) or len(found) != 3:
        return "not a class loss with its backward alone"
    if 0 not in getitem_users(forward):
        return "backward computes the loss again, and forward's own is another"
    weight, reduction = forward.args[2:4]
    if weight is not None or reduction == NONE:
        return "class weights, or a loss for each row"
    total = getitem_users(forward).get(1)
    slope = last.args[0].args[0] if is_cast(last.args[0]) and len(last.args[0].users) == 1 else last.args[0]
    if forward.args[1:] != backward.args[2:6] or slope is not backward or len(backward.users) != 1:
        return "its backward belongs to another loss"
    if total is not None and set(total.users) != {backward}:
        return "the number of rows is read elsewhere"
    logits, gradient, reader, cap = _ends(softmax, last)
    rows, targets = softmax.meta["val"], forward.args[1].meta["val"]
    if softmax.args[1] not in (1, -1) or rows.ndim != 2 or rows.dtype not in DTYPES:
        return f"logits of {rows.ndim} dimensions in {rows.dtype}"
    if targets.dtype != torch.int64:
        return f"targets in {targets.dtype}"
    if aliases.written_between(logits, aliases.position[reader], aliases.position[forward]):
        return "its logits are overwritten before it"
    if not _known_before(backward.args[0], forward, aliases):
        return "the gradient that comes in depends on the loss"
    root = aliases.root(logits)
    members = [n for n in aliases.position if aliases.root(n) is root]
    used = {user for member in members for user in member.users if not is_view(user)}
    private = root.op == "call_function" and logits.meta["val"].is_contiguous() and used == {reader}
    return _Loss(logits, softmax, forward, backward, gradient, cap, private)


#: What a loss begins with.
_OF_LOGITS = (aten._log_softmax.default, aten.logsumexp.default)
_FIRST = (*_OF_LOGITS, torch.ops.stepgraph.token_gradient_.default)


def _ends(softmax: fx.Node, last: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, float]:
    """(logits, their gradient, the first reader of the logits, the soft cap between): outside of the soft cap and of
    casts to fp32 and back around it, if there are any.

    Between them a tensor may be reshaped, as Hugging Face's losses do.
    """
    logits, gradient, reader = _before_cast(softmax.args[0], last, softmax)
    if (capped := _before_cap(logits, gradient, reader)) is None:
        return logits, gradient, reader, 0.0
    *inner, cap = capped
    return *_before_cast(*inner), cap


def _before_cast(logits: fx.Node, gradient: fx.Node, reader: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """What is outside of a cast to fp32 and back; the arguments if there is none."""
    cast, back = logits, gradient
    while cast.target in RESHAPES and len(cast.users) == 1:
        cast = cast.args[0]
    while not is_cast(back) and (user := only_user(back)) and (is_cast(user) or user.target in RESHAPES):
        back = user
    if is_cast(cast) and len(cast.users) == 1 and is_cast(back):
        before, after = cast.args[0].meta["val"], back.meta["val"]
        if before.dtype in DTYPES and before.dtype == after.dtype:
            return cast.args[0], back, cast
    return logits, gradient, reader


def _before_cap(logits: fx.Node, gradient: fx.Node, reader: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, float] | None:
    """What is outside of ``cap tanh(x / cap)`` and of its gradient, and ``cap``; None without it."""
    while logits.target in RESHAPES and only_user(logits) is reader:
        logits, reader = logits.args[0], logits
    while (up := only_user(gradient)) and up.target in RESHAPES:
        gradient = up
    cap, tanh = factor_of(logits), logits.args[0] if logits.args else None
    if not cap or cap < 0 or only_user(logits) is not reader or tanh.target is not aten.tanh.default:
        return None
    down, up = tanh.args[0], only_user(gradient)
    slope = up and only_user(up)
    end = slope and only_user(slope)
    if end is None or slope.target is not aten.tanh_backward.default or slope.args[0] is not up:
        return None
    alone = only_user(down) is tanh and set(readers(tanh)) == {logits, slope}
    factors = factor_of(up), factor_of(end), factor_of(down)
    if not alone or None in factors or factors[:2] != (cap, factors[2]) or abs(factors[2] * cap - 1) > 1e-6:
        return None
    return down.args[0], end, down, cap


def _known_before(node: fx.Node, loss: fx.Node, aliases: Aliases) -> bool:
    """Whether ``node`` can be computed before ``loss``: of a tensor of ones, only the shape matters."""
    at = aliases.position
    if node.target is aten.ones_like.default or at[node] < at[loss]:
        return True
    if not is_pure(node) or isinstance(node.meta["val"], (list, tuple)):
        return False
    sources = node.all_input_nodes
    return all(_known_before(s, loss, aliases) and not aliases.written_between(s, at[loss], at[node]) for s in sources)

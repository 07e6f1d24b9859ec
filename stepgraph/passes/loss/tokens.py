"""The head and its tokens' log-probabilities in parts of the tokens, as `fuse_loss` rewrites them.

Matches: ``_log_softmax`` of the logits ``x w^T`` (with a bias, a factor, casts, reshapes and slices of rows between),
read by a ``gather`` of one label per token, by the sum of ``p log p`` without a gradient, and in backward by what the
gather's gradient becomes. DPO, GRPO and other policy gradients have it.

    before: logits = x w^T                 after, for each part of the rows of x, one after the other:
            logs = log_softmax(logits)             logits = x_i w^T; log_prob_i, log_sum_i, entropy_i = stats(logits)
            log_prob = gather(logs)                in backward: logits again, written over by their gradient
            dx, dw of the logits' gradient         dx_i = logits w; dw += logits^T x_i

In one part the logits are kept for backward, else their product is computed again: no tensor in fp32, and none of all
logits. Views of logits become views of ``x``, and those of their gradient views of ``dx``.
Numbers: the operators compute in fp32 whatever ``logs`` has, and round once. ``dw`` as in `chunk`.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

import stepgraph.kernels.loss.tokens  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_cast, only_user
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.passes.loss.head import RESHAPES, SAME, Head, place, readers, unfit

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
_IGNORE = -100  # a gather takes no negative label, so that none is left out


@dataclass
class TokenHead:
    """The nodes of a head and what its tokens' log-probabilities are read by.

    ``views``: from the product to the softmax; ``back``: from the softmax's gradient ``last`` to the product's.
    ``sums``: those of ``p log p``; ``first``: the first of them and the gather. ``slope``: the gathered one's gradient.
    """

    softmax: fx.Node
    head: Head
    views: list[fx.Node]
    gather: fx.Node
    sums: list[fx.Node]
    first: fx.Node
    scale: float = 1.0
    last: fx.Node | None = None
    slope: fx.Node | None = None
    back: list[fx.Node] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return math.prod(self.softmax.meta["val"].shape[:-1])

    def rewrite(self, bounds: list[tuple[int, int]]) -> None:
        """Put the rows of each of ``bounds`` in the place of all."""
        writer = _Writer(self, bounds)
        writer.forward()
        if self.last is not None:
            writer.backward()
        ends = [*self.head.dx, *self.head.dw, *self.head.db]
        erase_unread(self.gather, *self.sums, *ends)


def is_match(softmax: fx.Node) -> bool:
    """Whether a label's log-probability is read of it, by what this rewrites."""
    return any(user.target is aten.gather.default for user in readers(softmax))


def match(softmax: fx.Node, aliases: Aliases) -> TokenHead | str:
    """The head whose logits ``softmax`` takes, or why it stays as it is."""
    last_dim, value = softmax.meta["val"].ndim - 1, softmax.meta["val"]
    if softmax.args[1] not in (-1, last_dim) or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"a softmax over dimension {softmax.args[1]} in {value.dtype}"
    node, views, scale = softmax.args[0], [], 1.0
    while node.target not in _PRODUCTS:
        factor = _factor(node)
        if len(node.users) != 1 or not (factor or _keeps_rows(node)):
            return "its logits are no matrix product" if len(node.users) == 1 else f"{node.name} is read elsewhere"
        views.insert(0, node)
        node, scale = node.args[0], scale * (factor or 1.0)
    if len(node.users) != 1 or node.kwargs:
        return f"{node.name}, its logits, is read elsewhere"
    found = _readers(softmax, last_dim)
    if isinstance(found, str):
        return found
    gather, sums, last = found
    first = min((gather, *sums), key=aliases.position.get)
    if gather.args[2].op == "call_function" and aliases.position[gather.args[2]] > aliases.position[first]:
        return "its labels are computed after the entropy"
    tokens = TokenHead(softmax, Head(node, last or gather), views, gather, sums, first, scale, last)
    return (_backward(tokens) if last is not None else None) or unfit(tokens.head, {node}, aliases) or tokens


def _readers(softmax: fx.Node, last_dim: int) -> tuple[fx.Node, list[fx.Node], fx.Node | None] | str:
    """(the gather, the sums of p log p, the gradient) that read ``softmax``."""
    gathers, sums, lasts, known = [], [], [], set()
    found = list(readers(softmax))
    for user in found:
        if user.target is aten.gather.default and user.args[1] in (-1, last_dim):
            gathers.append(user)
        elif user.target is aten._log_softmax_backward_data.default and _itself(user.args[1]) is softmax:
            lasts.append(user)
        elif user.target is aten.exp.default and (product := only_user(user)) in found:
            total = only_user(product)
            multiplied = {_itself(n) for n in product.args} if product.target is aten.mul.Tensor else set()
            if multiplied == {user, softmax} and _sums_last(total):
                sums.append(total)
                known |= {user, product}
    if len(gathers) != 1 or len(lasts) > 1:
        return f"{len(gathers)} gathers and {len(lasts)} gradients read it"
    if other := set(found) - known - {gathers[0], *lasts}:
        return f"{min(other).name} reads all log-probabilities"
    if gathers[0].args[2].meta["val"].shape != (*softmax.meta["val"].shape[:-1], 1):
        return "several labels for each token"
    return gathers[0], sums, lasts[0] if lasts else None


def _itself(node: fx.Node) -> fx.Node:
    """``node`` without other names of it."""
    return _itself(node.args[0]) if node.target in SAME else node


def _sums_last(node: fx.Node | None) -> bool:
    return node is not None and node.target is aten.sum.dim_IntList and node.args[1] in (
        [-1], [node.args[0].meta["val"].ndim - 1]
    ) and not node.kwargs  # fmt: skip


def _backward(tokens: TokenHead) -> str | None:
    """Find what leads from the softmax's gradient to those of the head; or why it cannot be rewritten."""
    grad, product = tokens.last.args[0], tokens.head.product
    if grad.target is not aten.scatter_add.default or len(grad.users) != 1 or grad.args[0].target not in _ZEROS:
        return "its gradient is not that of the gather alone"
    if grad.args[1:3] != (tokens.gather.args[1], tokens.gather.args[2]):
        return "its gradient is of other labels"
    tokens.slope = grad.args[3]
    node, scale = tokens.last, 1.0
    while (user := only_user(node)) is not None and user.target not in (aten.t.default, *_PRODUCTS):
        factor = _factor(user)
        if not (factor or _keeps_rows(user) or _pads_rows(user)):
            return f"{user.name} reads the gradient of its logits"
        node, scale = user, scale * (factor or 1.0)
        tokens.back.append(node)
    if node.meta["val"].shape != product.meta["val"].shape or node.meta["val"].dtype != product.meta["val"].dtype:
        return "the gradient of its logits is not that of a product"
    if not math.isclose(scale, tokens.scale):
        return "the gradient of its logits has another factor"
    for user in node.users:
        if reason := place(user, tokens.head, {node}):
            return reason
    if tokens.head.between:
        return f"{tokens.head.between[0].name} reads the gradient of its logits"
    return None


def _factor(node: fx.Node) -> float | None:
    """The number that ``node`` multiplies a tensor by."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or node.kwargs or isinstance(node.args[1], fx.Node):
        return None
    number = float(node.args[1])
    return number if node.target is aten.mul.Tensor else 1 / number if number else None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether ``node`` casts, or views whole rows."""
    if is_cast(node):
        return True
    before, after = (n.meta["val"] for n in (node.all_input_nodes[0], node)) if node.all_input_nodes else (None, None)
    if not isinstance(before, torch.Tensor) or before.ndim == 0 or before.shape[-1:] != after.shape[-1:]:
        return False
    sliced = node.target is aten.slice.Tensor and (node.args[1:2] or (0,))[0] % before.ndim != before.ndim - 1
    return node.target in RESHAPES or sliced


def _pads_rows(node: fx.Node) -> bool:
    return node.target is aten.slice_backward.default and node.args[2] % len(node.args[1]) != len(node.args[1]) - 1


class _Writer:
    """Writes a head in parts."""

    def __init__(self, tokens: TokenHead, bounds: list[tuple[int, int]]):
        self.tokens, self.head, self.bounds = tokens, tokens.head, bounds
        self.width = self.head.x.meta["val"].shape[1]
        self.lead = list(tokens.softmax.meta["val"].shape[:-1])
        self.kept: list[fx.Node] = []

    def forward(self) -> None:
        tokens = self.tokens
        build = self._builder(tokens.gather, tokens.first)
        x = self._along(build, self.head.x, tokens.views)
        self.x = self._rows(build, x, [tokens.rows, self.width])
        self.labels = self._rows(build, tokens.gather.args[2], [tokens.rows])
        found = []
        for part in self.bounds:
            logits = self._logits(build, part)
            if len(self.bounds) == 1:
                self.kept.append(logits)
            stats = build(ours.token_stats.default, logits, self._part(build, self.labels, part), tokens.scale, _IGNORE)
            found.append([build(operator.getitem, stats, i) for i in range(3)])
        log_prob, self.log_sum, self.entropy = (self._cat(build, list(parts)) for parts in zip(*found, strict=True))
        self._put(build, log_prob, tokens.gather)
        for total in tokens.sums:
            later = Builder(total, before=total)
            self._put(later, later(aten.neg.default, self.entropy), total)

    def backward(self) -> None:
        tokens, head, last = self.tokens, self.head, self.tokens.last
        build = self._builder(last, last)
        slope = build.cast(self._rows(build, tokens.slope, [tokens.rows]), torch.float32)
        none = build(aten.zeros_like.default, slope)
        weight = build(aten.t.default, head.weight) if head.dx else None
        dx, dw, db = [], None, []
        for part in self.bounds:
            logits = self.kept[0] if self.kept else self._logits(build, part)
            numbers = [self._part(build, t, part) for t in (self.labels, self.log_sum, self.entropy, slope, none)]
            build(ours.token_gradient_.default, logits, *numbers, tokens.scale, _IGNORE)
            if head.dx:
                dx.append(build(aten.mm.default, logits, weight))
            if head.dw:
                gradient, x = build(aten.t.default, logits), self._part(build, self.x, part)
                dw = build(aten.mm.default, gradient, x) if dw is None else build(
                    aten.addmm.out, dw, gradient, x, out=dw
                )  # fmt: skip
            if head.db:
                db.append(build(aten.sum.dim_IntList, logits, [0], True, dtype=torch.float32))
        if dx:
            whole = build.view(self._cat(build, dx), [*self.lead, self.width])
            whole = self._along(build, whole, tokens.back)
            self._replace(head.dx, build.view(whole, head.x.meta["val"].shape))
        self._replace(head.dw, dw)
        for node in head.db:
            total = db[0]
            for part in db[1:]:
                total = build(aten.add.Tensor, total, part)
            value = node.meta["val"]
            node.replace_all_uses_with(build.cast(build.view(total, value.shape), value.dtype))

    @staticmethod
    def _replace(nodes: list[fx.Node], new: fx.Node | None) -> None:
        for node in nodes:
            node.replace_all_uses_with(new)

    def _builder(self, like: fx.Node, before: fx.Node) -> Builder:
        """Adds nodes that Inductor leaves alone: products, and what their memory is given back after."""
        return _Eager(like, before=before)

    def _logits(self, build: Builder, part: tuple[int, int]) -> fx.Node:
        x, head = self._part(build, self.x, part), self.head
        if head.bias is None:
            return build(aten.mm.default, x, head.weight, like=head.product)
        return build(aten.addmm.default, head.bias, x, head.weight, like=head.product)

    def _part(self, build: Builder, node: fx.Node, part: tuple[int, int]) -> fx.Node:
        return node if len(self.bounds) == 1 else build(aten.slice.Tensor, node, 0, *part)

    @staticmethod
    def _cat(build: Builder, parts: list[fx.Node]) -> fx.Node:
        return parts[0] if len(parts) == 1 else build(aten.cat.default, parts)

    @staticmethod
    def _rows(build: Builder, node: fx.Node, shape: list[int]) -> fx.Node:
        if not node.meta["val"].is_contiguous():
            node = build(aten.clone.default, node, memory_format=torch.contiguous_format)
        return build.view(node, shape)

    @staticmethod
    def _put(build: Callable[..., fx.Node], new: fx.Node, old: fx.Node) -> None:
        value = old.meta["val"]
        old.replace_all_uses_with(build.cast(build.view(new, value.shape), value.dtype))

    def _along(self, build: Builder, node: fx.Node, views: list[fx.Node]) -> fx.Node:
        """``node``, whose rows are those of logits, through the ``views`` that logits go through."""
        for view in views:
            if is_cast(view) or _factor(view):
                continue
            shape = [*view.meta["val"].shape[:-1], self.width]
            if view.target is aten.slice.Tensor:
                node = build(view.target, node, *view.args[1:])
            elif view.target is aten.slice_backward.default:
                node = build(view.target, node, [*view.args[1][:-1], self.width], *view.args[2:])
            else:
                node = self._rows(build, node, shape)
        return node


class _Eager(Builder):
    def __call__(self, target: Callable, *args: object, **kwargs: object) -> fx.Node:
        node = super().__call__(target, *args, **kwargs)  # pyrefly: ignore[bad-argument-type]
        node.meta[KEEP_EAGER] = True
        return node

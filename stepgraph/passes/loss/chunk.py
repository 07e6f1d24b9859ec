"""The head and its loss in parts of the tokens, and at widths that products like, as `fuse_loss` rewrites them.

Matches: ``stepgraph::cross_entropy_`` on the logits ``x w^T`` (with a bias, a soft cap or other pointwise operators and
reshapes between), whose gradient is read by the products for ``dx`` and ``dw`` (and the bias's sum) alone.

    before: logits = x w^T            after, for each part of the rows of x, one behind the other:
            loss, over logits                 logits = x_i w^T; loss_i, over logits
            dx = logits w                     dx_i = logits w; dw += logits^T x_i
            dw = logits^T x           then: loss = sum(loss_i) / count; dx = cat(dx_i)

so that the logits of one part are alive at a time. A vocabulary whose rows do not start at multiples of 16 bytes is
padded with rows of zeros: all three products then take the fast kernels, and nothing of the logits' size is copied.
Numbers: ``dw`` is kept in its own dtype, as eager's is: products add to it in fp32 and round once a part. ``loss`` and
the bias's gradient are added in fp32. Everything else is computed as before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

import stepgraph.kernels.loss.cross_entropy  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_pointwise, is_pure
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.passes.contract import PassReport

aten = torch.ops.aten
Chunks = int | Literal["auto"]

#: What ``auto`` allows the logits of a part, and the fewest rows for products that are as fast as over all.
PART_BYTES, FEWEST_ROWS = 5 * 2**28, 2048
_ALIGNMENT = 16  # bytes, of a row that cuBLAS's fast kernels take
_WIDTH = 64  # a padded vocabulary is a multiple of it, as tiles are
_PADDED_ROWS = 512  # below them, the padded copy of the weight costs more than it gains
#: Views that leave rows of logits whole and in their order, if they leave their width.
_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.alias.default, aten.detach.default,
)  # fmt: skip


def check_chunks(chunks: Chunks) -> None:
    """Raises ``ValueError`` unless ``chunks`` is a number of parts."""
    if chunks != "auto" and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"loss_chunks={chunks}; allowed: auto, or a number of parts from 1 on")


@dataclass
class Head:
    """The nodes of a head and its loss. ``between``: what lies between ``product`` and what reads the gradient, in the
    order of the graph, ``loss`` among it. ``weight``: (D, V). ``dx``, ``dw``, ``db``: the readers of the gradient."""

    product: fx.Node
    loss: fx.Node
    between: list[fx.Node] = field(default_factory=list)
    transposed: list[fx.Node] = field(default_factory=list)
    dx: list[fx.Node] = field(default_factory=list)
    dw: list[fx.Node] = field(default_factory=list)
    db: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bias, self.x, self.weight = (None, *self.product.args)[-3:]
        self.shape = tuple(self.product.meta["val"].shape)

    def chunks(self, wanted: Chunks) -> int:
        """How many parts: ``wanted``, or as many as memory asks for."""
        rows, itemsize = self.shape[0], self.product.meta["val"].element_size()
        if wanted == "auto":
            wanted = min(math.ceil(rows * self.shape[1] * itemsize / PART_BYTES), rows // FEWEST_ROWS)
        return max(min(wanted, rows), 1)

    @property
    def padding(self) -> int:
        """Columns of zeros to add to the vocabulary. Pointwise operators might make something else of them."""
        (rows, columns), itemsize = self.shape, self.product.meta["val"].element_size()
        plain = all(node.target in _RESHAPES or node is self.loss for node in self.between)
        return -columns % _WIDTH if plain and rows >= _PADDED_ROWS and columns * itemsize % _ALIGNMENT else 0


def rewrite(loss: fx.Node, wanted: Chunks, report: PassReport) -> str:
    """Put the head of ``loss``, a ``stepgraph::cross_entropy_``, in parts; what was done, for the pass's summary."""
    aliases = Aliases(loss.graph)
    head = _match(loss, aliases)
    if isinstance(head, str):
        if _wants(loss, wanted):
            report.notes.append(f"the head of {loss.name} stays in one part: {head}")
        return ""
    chunks = head.chunks(wanted)
    if chunks == 1 and not head.padding:
        return ""
    rows, columns = head.shape
    step = math.ceil(rows / chunks)
    if chunks > 1 and step > 128:
        step = math.ceil(step / 128) * 128  # whole tiles
    bounds = [(a, min(a + step, rows)) for a in range(0, rows, step)]
    _Writer(head, aliases).write(bounds)
    padded = f", the vocabulary padded to {columns + head.padding}" if head.padding else ""
    return f"; head and loss of {rows} x {columns} logits in {len(bounds)} parts of {min(step, rows)} rows{padded}"


def _wants(loss: fx.Node, wanted: Chunks) -> bool:
    """Whether the logits are so large, or the caller so clear, that a head in one part needs a reason."""
    value = loss.args[0].meta["val"]
    return value.numel() * value.element_size() > PART_BYTES if wanted == "auto" else wanted > 1


# How it is found


def _match(loss: fx.Node, aliases: Aliases) -> Head | str:
    """The head whose logits ``loss`` takes, or why there is none that can be put in parts."""
    product = _product(loss.args[0], math.prod(loss.args[0].meta["val"].shape))
    if product is None:
        return "its logits are no matrix product"
    head = Head(product, loss)
    region, queue = {product}, [product]
    while queue:
        for user in queue.pop().users:
            if user in region:
                continue
            reason = _place(user, head, region)
            if reason:
                return reason
            if user in head.between and user is not loss:
                region.add(user)
                queue.append(user)
    head.between = sorted({*head.between, loss}, key=aliases.position.get)
    return _unfit(head, region, aliases) or head


def _product(node: fx.Node, size: int) -> fx.Node | None:
    """The matrix product that ``node``'s elements come from, one by one."""
    seen = set()
    while node not in seen and node.op == "call_function":
        seen.add(node)
        if node.target is aten.mm.default or (node.target is aten.addmm.default and not node.kwargs):
            return node
        large = [n for n in node.all_input_nodes if _size(n) == size]
        if len(large) != 1 or not _by_row(node):
            return None
        node = large[0]
    return None


def _place(user: fx.Node, head: Head, region: set[fx.Node]) -> str | None:
    """Put ``user``, which reads the logits or what was made of them, where it belongs in ``head``; or why it cannot."""
    value = user.meta.get("val")
    size, columns = math.prod(head.shape), head.shape[1]
    if user is head.loss:
        head.between.append(user)
    elif user.target is aten.t.default:
        others = [
            u for u in user.users if u.target is not aten.mm.default or u.args[0] is not user or u.args[1] is user
        ]
        if others:
            return f"{others[0].name} reads its transpose"
        head.transposed.append(user)
        head.dw += user.users
    elif user.target is aten.mm.default and user.args[1] not in region and user.args[0].meta["val"].shape == head.shape:
        head.dx.append(user)
    elif user.target is aten.sum.dim_IntList and user.args[1:] in (([0], True), ([0],)) and not user.kwargs:
        head.db.append(user)
    elif isinstance(value, torch.Tensor) and _size(user) == size and value.shape[-1] == columns:
        if not _by_row(user):
            return f"{user.name} reads its logits"
        if user not in head.between:
            head.between.append(user)
    else:
        return f"{user.name} reads its logits"
    return None


def _unfit(head: Head, region: set[fx.Node], aliases: Aliases) -> str | None:
    """Why ``head`` cannot be computed where its loss is."""
    here = aliases.position[head.loss]
    x, columns = head.x, head.weight.meta["val"]

    def early(node: fx.Node) -> bool:
        return aliases.position[node] < here

    for node in (n for n in head.between if n is not head.loss):
        for source in node.all_input_nodes:
            if source not in region and (source.meta["val"].ndim or not early(source)):
                return f"{node.name} reads {source.name} beside its logits"
    for reader in (*head.dx, *head.dw, *head.db):
        if aliases.position[reader] < here:
            return f"{reader.name} reads its logits before the loss"
    for product in head.dx:
        other = product.args[1]
        same = aliases.root(other) is aliases.root(head.weight)
        if (
            not same
            or other.meta["val"].stride() != columns.t().stride()
            or other.meta["val"].shape != columns.t().shape
        ):
            return f"{product.name} multiplies by another weight"
    for product in head.dw:
        if product.args[1] is not x:
            return f"{product.name} multiplies by what is not the input of the head"
    last = max(map(aliases.position.get, (*head.dx, *head.dw)), default=here)
    for tensor in (x, head.weight):
        if aliases.written_between(tensor, aliases.position[head.product], last):
            return f"{tensor.name} is written to between forward and backward"
    return None


def _by_row(node: fx.Node) -> bool:
    """Whether rows of the node's result come from the same rows of what it reads."""
    return node.target in _RESHAPES or (is_pointwise(node) and is_pure(node))


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else -1


# How it is written


class _Writer:
    """Writes a head in parts before its loss. The loss counts as where all of it runs: nothing gathers or computes the
    weight again for its backward."""

    def __init__(self, head: Head, aliases: Aliases):
        self.head, self.aliases = head, aliases
        self.columns = head.shape[1] + head.padding
        self.parts: list[fx.Node] = []
        self.sums: dict[fx.Node, list[fx.Node]] = {node: [] for node in (*head.dx, *head.db)}
        self.totals: dict[fx.Node, fx.Node] = {}

    def write(self, bounds: list[tuple[int, int]]) -> None:
        """The parts of the rows in ``bounds``, and what they give together in the places of what was there."""
        loss = self.head.loss
        _, self.targets, grad, mean, self.ignore = loss.args
        build = self._builder(loss)
        count = None
        if mean:
            count = build(aten.sum.default, build(aten.ne.Scalar, self.targets, self.ignore))
            grad = build(aten.div.Tensor, grad, count)
        self.grad = grad
        self._operands()
        for first, last in bounds:
            self._part(first, last)
        total = self._sum(build, self.parts)
        loss.replace_all_uses_with(build(aten.div.Tensor, total, count) if mean else total)
        self._join()

    def _builder(self, like: fx.Node, eager: bool = False) -> Callable[..., fx.Node]:
        """Adds nodes in the name of ``like``, in the phase of the loss; ``eager``: products, which Inductor would not
        make faster and whose results it would copy where they are added to."""
        plain = Builder(like, before=self.head.loss)
        plain.origin = plain.origin._replace(phase="loss")

        def build(*args: object, **kwargs: object) -> fx.Node:
            node = plain(*args, **kwargs)
            if eager:
                node.meta[KEEP_EAGER] = True
            return node

        return build

    def _operands(self) -> None:
        """The weight in both orientations and the bias, with zeros behind the vocabulary's end."""
        head, build = self.head, self._builder(self.head.product, eager=True)
        self.weight, self.bias = head.weight, head.bias
        if head.padding:
            rows = build(aten.t.default, head.weight)
            rows = build(aten.constant_pad_nd.default, rows, [0, 0, 0, head.padding], 0.0)
            self.weight = build(aten.t.default, rows)
            self.bias = self.bias and build(aten.constant_pad_nd.default, self.bias, [0, head.padding], 0.0)
        self.rows_of_weight = build(aten.t.default, self.weight) if head.dx else None

    def _part(self, first: int, last: int) -> None:
        head = self.head
        products = self._builder(head.product, eager=True)
        x = products(aten.slice.Tensor, head.x, 0, first, last)
        made = {}
        if self.bias is None:
            made[head.product] = products(aten.mm.default, x, self.weight)
        else:
            made[head.product] = products(aten.addmm.default, self.bias, x, self.weight)
        for node in head.between:
            if node is head.loss:
                self._loss(made, first, last)
            elif node.target in _RESHAPES:
                made[node] = made[node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made.get(n, n))
                made[node] = self._builder(node)(node.target, *args, **kwargs)
        for node in head.dx:
            build = self._builder(node, eager=True)
            self.sums[node].append(build(aten.mm.default, made[node.args[0]], self.rows_of_weight))
        for node in head.dw:
            build = self._builder(node, eager=True)
            gradient = build(aten.t.default, made[node.args[0].args[0]])
            total = self.totals.get(node)
            if total is None:
                self.totals[node] = build(aten.mm.default, gradient, x)
            else:
                self.totals[node] = build(aten.addmm.out, total, gradient, x, out=total)
        for node in head.db:
            build = self._builder(node)
            wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
            self.sums[node].append(build(aten.sum.dim_IntList, made[node.args[0]], *node.args[1:], dtype=wide))

    def _loss(self, made: dict[fx.Node, fx.Node], first: int, last: int) -> None:
        """The loss of a part, over its logits."""
        head = self.head
        build = self._builder(head.loss, eager=True)
        logits = made[head.loss.args[0]]
        if head.padding:
            logits = build(aten.slice.Tensor, logits, 1, 0, head.shape[1])
        targets = build(aten.slice.Tensor, self.targets, 0, first, last)
        self.parts.append(build(head.loss.target, logits, targets, self.grad, False, self.ignore))

    def _join(self) -> None:
        """Put what the parts give in the places of what was there, which goes."""
        head = self.head
        for node in head.dx:
            node.replace_all_uses_with(self._builder(node)(aten.cat.default, self.sums[node]))
        for node in head.dw:
            node.replace_all_uses_with(self._narrow(node, self.totals[node], 0))
        for node in head.db:
            build = self._builder(node)
            total = self._narrow(node, self._sum(build, self.sums[node]), node.meta["val"].ndim - 1)
            dtype = node.meta["val"].dtype
            same = total.meta["val"].dtype == dtype
            node.replace_all_uses_with(total if same else build(aten._to_copy.default, total, dtype=dtype))
        gone = {head.product, *head.between, *head.transposed, *head.dx, *head.dw, *head.db}
        sources = {source for node in gone for source in node.all_input_nodes} - gone
        for node in sorted(gone, reverse=True):
            node.graph.erase_node(node)
        erase_unread(*sources)

    def _narrow(self, like: fx.Node, node: fx.Node, dim: int) -> fx.Node:
        """``node`` without the padding in ``dim``."""
        if not self.head.padding:
            return node
        return self._builder(like, eager=True)(aten.slice.Tensor, node, dim, 0, self.head.shape[1])

    @staticmethod
    def _sum(build: Callable[..., fx.Node], parts: list[fx.Node]) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = build(aten.add.Tensor, total, part)
        return total

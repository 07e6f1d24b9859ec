"""The head and its loss in parts of the tokens, and at widths that products like, as `fuse_loss` rewrites them.

Matches: what `head` finds around a ``stepgraph::cross_entropy_``.

    before: logits = x w^T            after, for each part of the rows of x, one by one:
            loss, over logits                 logits = x_i w^T; loss_i, over logits
            dx = logits w                     dx_i = logits w; dw += logits^T x_i
            dw = logits^T x           then: loss = sum(loss_i) / count; dx = cat(dx_i)

so that the logits of one part are alive at a time. A vocabulary whose rows do not start at multiples of 16 bytes is
padded with rows of zeros: all three products then take the fast kernels, and nothing of the logits' size is copied.
Numbers: ``dw`` is kept in its own dtype, as eager's is: products add to it in fp32 and round once a part. ``loss`` and
the bias's gradient are added in fp32. Everything else is computed as before.

With ``rows="counted"`` the rows whose label counts move to the front, and only they are multiplied, however many:

    order = sort(labels != ignore); x' = x[order]; in each part the products of `stepgraph.kernels.loss.counted`
    dx = where(labels != ignore, cat(dx_i)[place of the row], 0)
"""

import math
from typing import Literal

import torch
from torch import fx

import stepgraph.kernels.loss.cross_entropy  # noqa: F401  (defines torch.ops.stepgraph)
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.kernels.loss import counted
from stepgraph.kernels.loss.heads import PART_BYTES, parts_of
from stepgraph.passes.contract import PassReport
from stepgraph.passes.loss.head import RESHAPES, Head, match

aten, ours = torch.ops.aten, torch.ops.stepgraph
Chunks = int | Literal["auto"]

_TILE = 128  # rows of a tile of a product
_FEW_COLUMNS = 4096  # of a head, below which rows are not sorted; an estimate


def check_chunks(chunks: Chunks) -> None:
    """Raises ``ValueError`` unless ``chunks`` is a number of parts."""
    if chunks != "auto" and (type(chunks) is not int or chunks < 1):
        raise ValueError(f"loss_chunks={chunks}; allowed: auto, or a number of parts from 1 on")


def rewrite(
    loss: fx.Node, wanted: Chunks, report: PassReport, part_bytes: int = PART_BYTES, counts: bool = False
) -> str:
    """Put the head of ``loss``, a ``stepgraph::cross_entropy_``, in parts; what was done, for the pass's summary.
    ``part_bytes``: of a part's logits, where ``wanted`` is auto. ``counts``: multiply only the rows that count."""
    head = match(loss, Aliases(loss.graph))
    if isinstance(head, str):
        if counts or _wants(loss, wanted, part_bytes):
            report.notes.append(f"the head of {loss.name} stays in one part: {head}")
        return ""
    chunks = parts(head, wanted, part_bytes)
    if counts and (reason := _counted_unfit(head)):
        report.notes.append(f"the head of {loss.name} computes all rows: {reason}")
        counts = False
    if chunks == 1 and not head.padding and not counts:
        return ""
    rows, columns = head.shape
    bounds, step = bounds_of(rows, chunks)
    (_CountedWriter if counts else _Writer)(head).write(bounds)
    padded = f", the vocabulary padded to {columns + head.padding}" if head.padding and not counts else ""
    several = f"{len(bounds)} parts of {step} rows" if len(bounds) > 1 else "one part"
    return f"; head and loss of {rows} x {columns} logits in {several}{padded}{', of rows that count' * counts}"


def _counted_unfit(head: Head) -> str | None:
    """Why there are no products of rows that count for ``head``."""
    others = [node for node in head.between if node is not head.loss and node.target not in RESHAPES]
    if others:
        return f"{others[0].name} reads its logits"
    x, columns = head.x.meta["val"], head.shape[1]
    if x.is_cuda and columns < _FEW_COLUMNS:
        return f"with {columns} columns, below {_FEW_COLUMNS}, sorting the rows would cost too much of what it saves"
    return None if counted.fits(x) else f"its input is {x.dtype} of {x.shape[1]} columns"


def bounds_of(rows: int, chunks: int) -> tuple[list[tuple[int, int]], int]:
    """(the rows of each part, how many a part has)."""
    step = math.ceil(rows / chunks)
    whole = math.ceil(step / _TILE) * _TILE
    if math.ceil(rows / whole) == chunks:
        step = min(whole, rows)
    return [(a, min(a + step, rows)) for a in range(0, rows, step)], step


def parts(head: Head, wanted: Chunks, part_bytes: int = PART_BYTES, rows: int | None = None) -> int:
    """How many: ``wanted``, or as many as memory asks for. ``rows``: those of the head that count, if not all."""
    rows = rows or head.shape[0]
    if wanted == "auto":
        return parts_of(rows, head.shape[1], head.product.meta["val"].element_size(), part_bytes)
    return max(min(wanted, rows), 1)


def _wants(loss: fx.Node, wanted: Chunks, part_bytes: int) -> bool:
    """Whether the logits are so large, or the caller so clear, that a head in one part needs a reason."""
    value = loss.args[0].meta["val"]
    return value.numel() * value.element_size() > part_bytes if wanted == "auto" else wanted > 1


class _Writer:
    """Writes a head in parts before its loss. The loss counts as where all of it runs: nothing gathers or computes the
    weight again for its backward."""

    def __init__(self, head: Head):
        self.head, self.x, self.padding = head, head.x, head.padding
        self.ordered = False  # whether rows that count come first
        self.parts: list[fx.Node] = []
        self.sums: dict[fx.Node, list[fx.Node]] = {node: [] for node in (*head.dx, *head.db)}
        self.totals: dict[fx.Node, fx.Node] = {}

    def write(self, bounds: list[tuple[int, int]]) -> None:
        """The parts of the rows in ``bounds``, and their joined results in place of the originals."""
        loss = self.head.loss
        _, self.targets, grad, mean, self.ignore, _, self.cap = loss.args
        build = self._builder(loss)
        count = None
        if mean:
            count = build(aten.sum.default, build(aten.ne.Scalar, self.targets, self.ignore))
            grad = build(aten.div.Tensor, grad, count)
        self.grad = grad
        self._operands()
        for first, last in bounds:
            self._part(first, last)
        total = build.total(self.parts)
        loss.replace_all_uses_with(build(aten.div.Tensor, total, count) if mean else total)
        self._join()

    def _builder(self, like: fx.Node, eager: bool = False) -> Builder:
        """Adds nodes in the name of ``like``, in the phase of the loss; ``eager``: products, which Inductor would not
        make faster and whose results it would copy where they are added to."""
        build = Builder(like, before=self.head.loss, mark=KEEP_EAGER if eager else None)
        build.origin = build.origin._replace(phase="loss")
        return build

    def _operands(self) -> None:
        """The weight in both orientations and the bias, with zeros after the vocabulary's end."""
        head, build = self.head, self._builder(self.head.product, eager=True)
        self.weight, self.bias = head.weight, head.bias
        if self.padding:
            rows = build(aten.t.default, head.weight)
            rows = build(aten.constant_pad_nd.default, rows, [0, 0, 0, self.padding], 0.0)
            self.weight = build(aten.t.default, rows)
            self.bias = self.bias and build(aten.constant_pad_nd.default, self.bias, [0, self.padding], 0.0)
        self.rows_of_weight = build(aten.t.default, self.weight) if head.dx else None

    def _part(self, first: int, last: int) -> None:
        head = self.head
        products = self._builder(head.product, eager=True)
        x = products(aten.slice.Tensor, self.x, 0, first, last)
        made = {head.product: self._logits(products, x, first)}
        for node in head.between:
            if node is head.loss:
                self._loss(made, first, last)
            elif node.target in RESHAPES:
                made[node] = made[node.args[0]]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made.get(n, n))
                made[node] = self._builder(node)(node.target, *args, **kwargs)
        for node in head.dx:
            self.sums[node].append(self._dx(self._builder(node, eager=True), made[node.args[0]], first))
        for node in head.dw:
            slopes = made[node.args[0].args[0]]
            self.totals[node] = self._dw(self._builder(node, eager=True), self.totals.get(node), slopes, x, first)
        for node in head.db:
            self.sums[node].append(self._db(node, made[node.args[0]], first))

    # What a part computes, of its rows from ``first`` on.

    def _logits(self, build: Builder, x: fx.Node, first: int) -> fx.Node:
        if self.bias is None:
            return build(aten.mm.default, x, self.weight)
        return build(aten.addmm.default, self.bias, x, self.weight)

    def _dx(self, build: Builder, slopes: fx.Node, first: int) -> fx.Node:
        return build(aten.mm.default, slopes, self.rows_of_weight)

    def _dw(self, build: Builder, total: fx.Node | None, slopes: fx.Node, x: fx.Node, first: int) -> fx.Node:
        return build.add_product(total, build(aten.t.default, slopes), x)

    def _db(self, node: fx.Node, slopes: fx.Node, first: int) -> fx.Node:
        wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
        return self._builder(node)(aten.sum.dim_IntList, slopes, *node.args[1:], dtype=wide)

    def _loss(self, made: dict[fx.Node, fx.Node], first: int, last: int) -> None:
        """The loss of a part, over its logits."""
        head = self.head
        build = self._builder(head.loss, eager=True)
        logits = made[head.loss.args[0]]
        if self.padding:
            logits = build(aten.slice.Tensor, logits, 1, 0, head.shape[1])
        targets = build(aten.slice.Tensor, self.targets, 0, first, last)
        more = self.ignore, self.ordered, self.cap
        self.parts.append(build(head.loss.target, logits, targets, self.grad, False, *more))

    def _join(self) -> None:
        """Replace the originals with the parts' results."""
        head = self.head
        for node in head.dx:
            node.replace_all_uses_with(self._all_rows(self._builder(node), self._builder(node).cat(self.sums[node])))
        for node in head.dw:
            node.replace_all_uses_with(self._narrow(node, self.totals[node], 0))
        for node in head.db:
            build = self._builder(node)
            total = self._narrow(node, build.total(self.sums[node]), node.meta["val"].ndim - 1)
            node.replace_all_uses_with(build.cast(total, node.meta["val"].dtype))
        gone = {head.product, *head.between, *head.transposed, *head.dx, *head.dw, *head.db}
        sources = {source for node in gone for source in node.all_input_nodes} - gone
        for node in sorted(gone, reverse=True):
            node.graph.erase_node(node)
        erase_unread(*sources)

    def _all_rows(self, build: Builder, dx: fx.Node) -> fx.Node:
        """The gradient of all rows of x, from ``dx`` of the rows in the parts."""
        return dx

    def _narrow(self, like: fx.Node, node: fx.Node, dim: int) -> fx.Node:
        """``node`` without the padding in ``dim``."""
        if node.meta["val"].shape[dim] == self.head.shape[1]:
            return node
        return self._builder(like, eager=True)(aten.slice.Tensor, node, dim, 0, self.head.shape[1])


class _CountedWriter(_Writer):
    """Moves the rows that count to the front, and multiplies only those."""

    def __init__(self, head: Head):
        super().__init__(head)
        self.padding, self.ordered = counted.padded(head.shape[1]) - head.shape[1], True

    def _operands(self) -> None:
        head = self.head
        self.weight, self.bias = head.weight, head.bias
        self.rows_of_weight = self._builder(head.product)(aten.t.default, head.weight) if head.dx else None
        build = self._builder(head.loss, eager=True)
        counts = build(aten.ne.Scalar, self.targets, self.ignore)
        self.end = build(aten.sum.default, counts, dtype=torch.int32)
        self.counts = build(aten.unsqueeze.default, counts, 1)
        ranked = build.cast(counts, torch.uint8)
        (order,) = build.parts(build(aten.sort.stable, ranked, stable=True, dim=0, descending=True), 1)
        self.x = build(aten.index_select.default, self.x, 0, order)
        self.targets = build(aten.index_select.default, self.targets, 0, order)
        # The new place of each row; rows before the first that counts have none.
        place = build(aten.sub.Tensor, build(aten.cumsum.default, counts, 0), 1)
        self.place = build(aten.clamp.default, place, 0)

    def _logits(self, build: Builder, x: fx.Node, first: int) -> fx.Node:
        return build(ours.counted_logits.default, x, self.weight, self.bias, self.end, first)

    def _dx(self, build: Builder, slopes: fx.Node, first: int) -> fx.Node:
        return build(ours.counted_dx.default, slopes, self.rows_of_weight, self.end, first)

    def _dw(self, build: Builder, total: fx.Node | None, slopes: fx.Node, x: fx.Node, first: int) -> fx.Node:
        add = total is not None
        if total is None:
            total = build(aten.new_empty.default, x, [self.head.shape[1], x.meta["val"].shape[1]])
        build(ours.counted_dw_.default, total, slopes, x, self.end, first, add)
        return total

    def _db(self, node: fx.Node, slopes: fx.Node, first: int) -> fx.Node:
        total = self._builder(node, eager=True)(ours.counted_db.default, slopes, self.end, first)
        lead = node.meta["val"].shape[:-1]
        return self._builder(node).view(total, [*lead, self.head.shape[1] + self.padding])

    def _all_rows(self, build: Builder, dx: fx.Node) -> fx.Node:
        """Rows that do not count have no gradient; what ``dx`` holds for others may be anything."""
        return build(aten.where.ScalarOther, self.counts, build(aten.index_select.default, dx, 0, self.place), 0.0)

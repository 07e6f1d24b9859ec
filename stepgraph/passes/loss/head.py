"""The head of a loss: the product that makes the logits, the nodes up to the loss, and the readers of their gradient.

Matches: ``stepgraph::cross_entropy_`` on the logits ``x w^T`` (with a bias, a soft cap or other pointwise operators and
reshapes between), whose gradient is read by the products for ``dx`` and ``dw`` (and the bias's sum) alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_pointwise, is_pure

aten = torch.ops.aten

_ALIGNMENT = 16  # bytes, of a row that cuBLAS's fast kernels take
_WIDTH = 64  # a padded vocabulary is a multiple of it, as tiles are
_PADDED_ROWS = 512  # below them, the padded copy of the weight costs more than it gains
NONE, MEAN = 0, 1  # torch's numbers for the reductions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that kernels of losses take
SAME = (aten.detach.default, aten.alias.default)  # other names; torch 2.15 puts alias where detach was
#: Views that leave rows of logits whole and in their order, if they leave their width.
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, *SAME)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads ``node``, directly or under another name."""
    for user in node.users:
        yield from readers(user) if user.target in SAME else (user,)


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

    @property
    def padding(self) -> int:
        """Columns of zeros to add to the vocabulary. Pointwise operators might make something else of them."""
        (rows, columns), itemsize = self.shape, self.product.meta["val"].element_size()
        plain = all(node.target in RESHAPES or node is self.loss for node in self.between)
        return -columns % _WIDTH if plain and rows >= _PADDED_ROWS and columns * itemsize % _ALIGNMENT else 0


def match(loss: fx.Node, aliases: Aliases) -> Head | str:
    """The head whose logits ``loss`` takes, or why there is none that can be put in parts."""
    product = _product(loss.args[0], math.prod(loss.args[0].meta["val"].shape))
    if product is None:
        return "its logits are not a matrix product"
    head = Head(product, loss)
    region, queue = {product}, [product]
    while queue:
        for user in queue.pop().users:
            if user in region:
                continue
            reason = place(user, head, region)
            if reason:
                return reason
            if user in head.between and user is not loss:
                region.add(user)
                queue.append(user)
    head.between = sorted({*head.between, loss}, key=aliases.position.get)
    return unfit(head, region, aliases) or head


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


def place(user: fx.Node, head: Head, region: set[fx.Node]) -> str | None:
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


def unfit(head: Head, region: set[fx.Node], aliases: Aliases) -> str | None:
    """Why ``head`` cannot be computed where its loss is."""
    here = aliases.position[head.loss]
    x, columns = head.x, head.weight.meta["val"]

    def early(node: fx.Node) -> bool:
        return aliases.position[node] < here

    for node in (n for n in head.between if n is not head.loss):
        for source in node.all_input_nodes:
            if source not in region and (source.meta["val"].ndim or not early(source)):
                return f"{node.name} reads {source.name} in addition to its logits"
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
    """Whether rows of the node's result come from the same rows of its input."""
    return node.target in RESHAPES or (is_pointwise(node) and is_pure(node))


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else -1

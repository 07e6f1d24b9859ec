"""The linear layers of a step, found by their products' inputs: forward, input gradient and weight gradient.

    forward           y  = x w^T     a product with a value made from one parameter only (``nn.Linear``), or
                                     y = x w (transformers' ``Conv1D``); with a bias, or without
    input gradient    dx = dy w      a product of backward with a value made from the same parameter
    weight gradient   dw = dy^T x    a product of backward with forward's input, or its transpose

Two nodes hold the same matrix if they show the same part of the same storage, however often it was viewed or
transposed between, and nothing has written it between.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.capture.roles import MIXED, made_from
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_pointwise, is_view, packet
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.graph.values import Parameter

aten, ours = torch.ops.aten, torch.ops.stepgraph

#: What turns logits into a loss, or scores into a choice of experts.
_LOSS = {aten._log_softmax, aten.logsumexp, aten.nll_loss_forward, ours.cross_entropy_}
_LOSS |= {ours.token_stats, ours.token_kl_stats}
_CHOICE = {aten.topk, aten.sort}
#: Multiply several matrices at once.
_BATCHED = {aten.bmm, aten.baddbmm, aten._grouped_mm, ours.grouped_mm}


class Side(NamedTuple):
    """One side of a product. ``matrix``: what identifies the matrix in memory, as it is when the product reads it.
    ``across``: the product reads its transpose."""

    node: fx.Node
    matrix: tuple
    across: bool


class Product(NamedTuple):
    """``node`` = ``a`` (M, K) ``b`` (K, N), plus ``bias`` (N,) if any. ``why_not``: it adds something else."""

    node: fx.Node
    a: Side
    b: Side
    bias: fx.Node | None = None
    why_not: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        (M, K), N = self.a.node.meta["val"].shape, self.b.node.meta["val"].shape[1]
        return M, N, K


@dataclass
class Layer:
    """One use of a linear layer. ``parameter``: the placeholder of its weight. ``x``, ``dy``: what identifies its input
    and its output's gradient; ``dy`` is None until a product of backward shows it."""

    path: str
    parameter: fx.Node
    forward: Product
    x: tuple
    dy: tuple | None = None
    input_gradient: Product | None = None
    weight_gradient: Product | None = None

    @property
    def products(self) -> list[Product]:
        """The layers found, forward first."""
        return [p for p in (self.forward, self.input_gradient, self.weight_gradient) if p is not None]


@dataclass
class Found:
    """``layers`` in the order of forward; ``other``: products of backward that belong to none of them. ``batched``:
    products of forward with a parameter that are several in one, as experts' are, which are not layers here."""

    layers: list[Layer] = field(default_factory=list)
    other: list[fx.Node] = field(default_factory=list)
    batched: list[fx.Node] = field(default_factory=list)


def find(step: StepGraph, aliases: Aliases) -> Found:
    """The linear layers of ``step``."""
    parameters = set(step.placeholders(Parameter))
    made = made_from(step.graph, parameters)
    found = Found()
    by_parameter: dict[fx.Node, list[Layer]] = defaultdict(list)
    by_input: dict[tuple, list[Layer]] = defaultdict(list)
    weight_gradients: list[Product] = []
    for product in _products(step, aliases):
        weight, other = made[product.b.node], made[product.a.node]
        alone = weight is not None and weight is not MIXED and other in (None, MIXED)
        if phase_of(product.node) in ("forward", "loss"):
            if alone:
                layer = Layer(provenance(product.node).path, weight, product, product.a.matrix)
                found.layers.append(layer)
                by_parameter[weight].append(layer)
                by_input[layer.x].append(layer)
        elif alone and _give_input_gradient(product, by_parameter[weight]):
            continue
        elif phase_of(product.node) == "backward":
            weight_gradients.append(product)  # once all gradients of inputs have shown what dy is
    for node in step.nodes("forward", "loss"):
        if packet(node) in _BATCHED and any(made[n] not in (None, MIXED) for n in node.all_input_nodes):
            found.batched.append(node)
    for product in weight_gradients:
        if not _give_weight_gradient(product, by_input):
            found.other.append(product.node)
    return found


def _products(step: StepGraph, aliases: Aliases) -> Iterator[Product]:
    for node in step.nodes("forward", "loss", "backward"):
        if node.target is aten.mm.default:
            yield Product(node, *(_side(n, node, aliases) for n in node.args))
        elif node.target is aten.addmm.default:
            bias, a, b = node.args
            plain = bias.meta["val"].shape == node.meta["val"].shape[1:] and not node.kwargs
            why = None if plain else "it adds a matrix, or scales"
            yield Product(node, _side(a, node, aliases), _side(b, node, aliases), bias, why)


def _side(node: fx.Node, product: fx.Node, aliases: Aliases) -> Side:
    """``node`` as ``product`` reads it."""
    value, root = node.meta["val"], aliases.root(node)
    across = value.stride(0) == 1 and value.stride(1) != 1
    shape, strides = (form[::-1] if across else form for form in (tuple(value.shape), value.stride()))
    writes = sum(position < aliases.position[product] for position in aliases.writes.get(root, ()))
    return Side(node, (root, writes, shape, strides, value.storage_offset(), value.dtype), across)


def _give_input_gradient(product: Product, layers: list[Layer]) -> bool:
    """Whether one of ``layers``, which share a parameter, has ``product`` as the gradient of its input now."""
    M, N, K = product.sizes
    # Backward comes to the last use of a layer first.
    fits = [layer for layer in reversed(layers) if layer.input_gradient is None and layer.forward.sizes == (M, K, N)]
    fits.sort(key=lambda layer: layer.path != provenance(product.node).path)
    for layer in fits[:1]:
        layer.input_gradient, layer.dy = product, product.a.matrix
    return bool(fits)


def _give_weight_gradient(product: Product, by_input: dict[tuple, list[Layer]]) -> bool:
    """Whether a layer has ``product`` as the gradient of its weight now. Among layers with the same input it is the
    one whose output's gradient is multiplied, or where none shows that, the one of the same module."""
    M, N, K = product.sizes
    path = provenance(product.node).path
    for x, dy, reads_rows in ((product.b, product.a, not product.b.across), (product.a, product.b, product.a.across)):
        fits = [
            layer
            for layer in by_input.get(x.matrix, ())
            if reads_rows and layer.weight_gradient is None and layer.dy in (None, dy.matrix)
            and layer.forward.sizes[0] == K and set(layer.forward.sizes[1:]) == {M, N}
        ]  # fmt: skip
        fits.sort(key=lambda layer: (layer.dy is None, layer.path != path))
        for layer in fits[:1]:
            layer.weight_gradient, layer.dy = product, dy.matrix
            return True
    return False


def is_head(layer: Layer) -> bool:
    """Whether the loss reads what the layer gives."""
    return _reaches(layer.forward.node, _LOSS, phase="loss")


def is_router(layer: Layer) -> bool:
    """Whether what the layer gives chooses experts."""
    return _reaches(layer.forward.node, _CHOICE, through=(aten._softmax,))


def _reaches(start: fx.Node, targets: set, phase: str | None = None, through: tuple = ()) -> bool:
    """Whether one of ``targets``, or any node of ``phase``, reads ``start`` through nothing but views, operators of
    each element by itself, and ``through``."""
    if phase is not None and phase_of(start) == phase:
        return True
    seen, queue = {start}, [start]
    while queue:
        for user in queue.pop().users:
            if user in seen or phase_of(user) == "backward":
                continue
            if packet(user) in targets or (phase is not None and phase_of(user) == phase):
                return True
            seen.add(user)
            alone = is_pointwise(user) and len(user.all_input_nodes) == 1  # not a product or sum of two streams
            if alone or is_view(user) or packet(user) in (aten.clone, *through):
                queue.append(user)
    return False

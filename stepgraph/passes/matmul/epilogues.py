"""GELU and its gradient inside the products before them, by QuACK's kernels, where the option asks for it.

    z = addmm(bias, x, w), a = gelu(z)          ->  z, a = gelu_product(x, w, bias)
    dz = gelu_backward(mm(dy, w), z), dz.sum(0)  ->  dz, db = gelu_product_backward(dy, w, z)

Matches bf16 products, with or without a bias, and with views in between. Saves a read of z in forward; in backward the
gradient of GELU's result is never written to memory. ``auto`` uses QuACK's if the package is installed and the pair was
faster on one H200 than QuACK's product followed by a kernel at a copy's speed: 1.09 to 1.27 times forward, 1.14 times
backward with GELU by tanh. It leaves the gradient of exact GELU alone, whose error function costs what is saved (0.96
to 1.03 times; `benchmarks/h200_epilogues.json`).
Tier numerics: GELU is computed from the fp32 sums, before they are rounded. Preconditions: only products read GELU's
result, since a compiler would fuse other readers with it and not write it; its gradient has no other reader; and
between the product and GELU nothing writes to the product's operands or its result.
Source: the package.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import RESHAPES, argument, behind_reshapes, only_user
from stepgraph.kernels import gelu, quack
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCTS = (aten.mm.default, aten.addmm.default)

#: What was measured: compute capability, and for products (M, K) (K, N) the least M, the range of K, and the least N.
_CAPABILITY, _ROWS, _INNER, _OUTER = (9, 0), 16384, (768, 1024), 3072


@dataclass(frozen=True)
class EpilogueOptions:
    """``backend``: of every product with GELU, or ``auto``. ``capability``: the GPU's, None where unknown; by the
    target."""

    backend: Literal["quack", "auto"] = "quack"
    capability: tuple[int, int] | None = None


@dataclass
class _Pair:
    """``product``, the ``gelu`` or ``gelu_backward`` that reads it through views, and in backward the ``sums`` of its
    result over rows."""

    product: fx.Node
    gelu: fx.Node
    sums: list[fx.Node] = field(default_factory=list)

    @property
    def matrices(self) -> tuple[fx.Node, fx.Node]:
        return self.product.args[-2:]

    @property
    def backward(self) -> bool:
        return self.gelu.target is aten.gelu_backward.default

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(M, K, N)."""
        a, b = (node.meta["val"] for node in self.matrices)
        return *a.shape, b.shape[1]


@register(
    "product_epilogues",
    "numerics",
    options=EpilogueOptions(),
    after=("fp8_matmul", "recompute", "async_tensor_parallel"),
    needs_cuda=True,
    from_options=lambda options: None if options.epilogues == "torch" else {"backend": options.epilogues},
    for_target=lambda options, target: replace(options, capability=target.capability),
    forecast=False,  # which knows one rate for both
)
def product_epilogues(step: StepGraph, options: EpilogueOptions, report: PassReport) -> None:
    """Compute GELU and its gradient inside the products before them, by QuACK's kernels."""
    aliases = Aliases(step.graph)
    found = [*_forward(step, aliases), *_backward(step, aliases)]
    report.matched = len(found)
    if not found:
        return
    able = [pair for pair in found if _takes(pair)]
    able, why = _chosen(able, options)
    for pair in able:
        (_rewrite_backward if pair.backward else _rewrite)(pair)
    report.changed = len(able)
    report.summary = f"{report.changed} of {report.matched} GELUs and gradients in products by QuACK: {why}"


def _forward(step: StepGraph, aliases: Aliases) -> Iterator[_Pair]:
    seen = set()  # a GELU that backward recomputes stays
    for node in step.calling(aten.gelu.default):
        product = behind_reshapes(node.args[0])
        plain = product.target is aten.mm.default or (
            product.target is aten.addmm.default
            and product.args[0].meta["val"].shape == product.meta["val"].shape[1:]
            and not product.kwargs
        )
        place = aliases.position[node]
        if not plain or product in seen or not feeds_products(node):
            continue
        if not aliases.written_between(product, aliases.position[product], place):
            seen.add(product)
            yield _Pair(product, node)


def _backward(step: StepGraph, aliases: Aliases) -> Iterator[_Pair]:
    for node in step.calling(aten.gelu_backward.default):
        product, reader = behind_reshapes(node.args[0]), node
        while reader is not product and only_user(reader.args[0]) is reader:
            reader = reader.args[0]
        if (
            reader is not product
            or product.target is not aten.mm.default
            or not node.args[1].meta["val"].is_contiguous()
        ):
            continue
        first, last = aliases.position[product], aliases.position[node]
        if not any(aliases.written_between(n, first, last) for n in product.args):
            yield _Pair(product, node, list(sums_of_rows(node, product.meta["val"].shape)))


def feeds_products(node: fx.Node, besides: Collection[fx.Node] = ()) -> bool:
    """Whether all readers of ``node`` are products or ``besides``, also through views."""
    return all(
        feeds_products(user, besides)
        if user.target in (*RESHAPES, aten.t.default)
        else user.target in _PRODUCTS or user in besides
        for user in node.users
    )


def sums_of_rows(node: fx.Node, shape: torch.Size) -> Iterator[fx.Node]:
    """Sums of the rows of ``node`` as a matrix of ``shape``."""
    for user in node.users:
        if user.target in RESHAPES:
            yield from sums_of_rows(user, shape)
        elif (
            user.target is aten.sum.dim_IntList
            and node.meta["val"].shape == shape
            and list(user.args[1]) in ([0], [-2])
            and argument(user, "dtype") is None
        ):
            yield user


def replace_sums(sums: Iterable[fx.Node], total: fx.Node) -> None:
    """``total`` takes the place of ``sums``, as `sums_of_rows` gives them."""
    for one in sums:
        build, value = Builder(one, before=one), one.meta["val"]
        replace_node(one, build.cast(build.view(total, value.shape), value.dtype), sweep=True)


def _takes(pair: _Pair) -> bool:
    """Whether the package supports the pair: bf16, with K and N multiples of 8 (16 bytes)."""
    inputs = [node.meta["val"] for node in (*pair.matrices, pair.gelu)]
    return all(gelu.on_device(x) for x in inputs) and all(size % 8 == 0 for size in pair.sizes[1:])


def _chosen(able: list[_Pair], options: EpilogueOptions) -> tuple[list[_Pair], str]:
    """The pairs to rewrite, of the ones that the package supports, and why."""
    if options.backend == "quack":
        why = quack.unavailable() if able else "none is in bf16 on a GPU"
        if why is not None:
            raise ValueError(f"epilogues=quack: {why}; use epilogues=torch or epilogues=auto")
        return able, "asked for"
    measured = [pair for pair in able if _faster(pair)]
    if not measured:
        return [], "no pair has sizes that were measured to be faster"
    if options.capability != _CAPABILITY:
        return [], "measured only on compute capability {}.{}".format(*_CAPABILITY)
    why = quack.unavailable()
    if why is not None:
        return [], why
    return measured, "faster for these sizes on one H200 (benchmarks/h200_epilogues.json)"


def _faster(pair: _Pair) -> bool:
    M, K, N = pair.sizes
    by_tanh = argument(pair.gelu, "approximate") == "tanh"
    return M >= _ROWS and _INNER[0] <= K <= _INNER[1] and N >= _OUTER and (by_tanh or not pair.backward)


def _rewrite(pair: _Pair) -> None:
    product, node = pair.product, pair.gelu
    bias = product.args[0] if product.target is aten.addmm.default else None
    build = Builder(product, node, before=product)
    both = build(ours.gelu_product.default, *pair.matrices, bias, argument(node, "approximate"))
    z, a = build.parts(both)
    a, view = build.view(a, node.meta["val"].shape), node.args[0]
    replace_node(product, z)
    replace_node(node, a)
    if view is not product:
        erase_unread(view)


def _rewrite_backward(pair: _Pair) -> None:
    product, node = pair.product, pair.gelu
    gradient, z = node.args[:2]
    build = Builder(product, node, before=node)
    z = build.view(z, product.meta["val"].shape)
    both = build(ours.gelu_product_backward.default, *pair.matrices, z, argument(node, "approximate"))
    dz, db = build.parts(both)
    replace_node(node, build.view(dz, node.meta["val"].shape))
    replace_sums(pair.sums, db)
    erase_unread(gradient)

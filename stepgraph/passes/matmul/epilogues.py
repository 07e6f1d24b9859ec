"""Activations and their gradients inside the products before them, by QuACK's kernels, where the option asks for it.

    z = addmm(bias, x, w), a = gelu(z)           ->  z, a = gelu_product(x, w, bias)
    dz = gelu_backward(mm(dy, w), z), dz.sum(0)  ->  dz, db = gelu_product_backward(dy, w, z)

and gated activations, as in `gated`. Matches bf16 products, with or without a bias, and with views in between. Saves a
read of z in forward; in backward the gradient of the activation's result is never written to memory. ``auto`` uses
QuACK's if the package is installed and the pair was faster on one H200: GELU than QuACK's product followed by a kernel
at a copy's speed (1.09 to 1.27 times forward, 1.14 times backward with GELU by tanh; `benchmarks/h200_epilogues.json`),
gated activations than the fastest of cuBLASLt's products followed by a kernel (1.09 to 1.19 times forward, 1.13 to 1.27
times backward; `benchmarks/h200_epilogues_gated.json`). It leaves the gradient of exact GELU alone, whose error
function costs what is saved (0.96 to 1.03 times).
Tier numerics: activations are computed from the fp32 sums, before they are rounded. Preconditions: only products read
the activation's result, since a compiler would fuse other readers with it and not write it; its gradient has no other
reader; and between the product and the activation nothing writes to the product's operands or its result.
Source: the package.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import argument, behind_reshapes, only_user
from stepgraph.kernels import gelu, quack
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.matmul.gated import gated_pairs
from stepgraph.passes.matmul.pairs import Pair, feeds_products, replace_sums, sums_of_rows

aten, ours = torch.ops.aten, torch.ops.stepgraph

#: Where it was measured: compute capability; what was faster there, and for products (M, K) (K, N) the least M, the
#: range of K, and the least N.
_CAPABILITY = (9, 0)
_GELU = [(16384, (768, 1024), 3072)]
_GATED = [(16384, (1024, 2048), 3072), (8192, (2048, 4096), 8192)]
_FASTER = {
    **dict.fromkeys(("GELU", "GELU by tanh", "gradient of GELU by tanh"), _GELU),
    **dict.fromkeys(("gated activation", "gradient of a gated activation"), _GATED),
}


@dataclass(frozen=True)
class EpilogueOptions:
    """``backend``: of every product with an activation, or ``auto``. ``capability``: the GPU's, None where unknown; by
    the target."""

    backend: Literal["quack", "auto"] = "quack"
    capability: tuple[int, int] | None = None


@dataclass
class _Forward(Pair):
    """``last`` is the GELU that reads the product through views."""

    @property
    def what(self) -> str:
        return _name(self.last)

    def rewrite(self) -> None:
        product, node = self.product, self.last
        bias = product.args[0] if product.target is aten.addmm.default else None
        build = Builder(product, node, before=product)
        both = build(ours.gelu_product.default, *self.matrices, bias, argument(node, "approximate"))
        z, a = build.parts(both)
        a, view = build.view(a, node.meta["val"].shape), node.args[0]
        replace_node(product, z)
        replace_node(node, a)
        if view is not product:
            erase_unread(view)


@dataclass
class _Backward(Pair):
    """``last`` is the gelu_backward that reads the product through views, ``sums`` are those of its result over
    rows."""

    sums: list[fx.Node] = field(default_factory=list)

    @property
    def what(self) -> str:
        return f"gradient of {_name(self.last)}"

    def rewrite(self) -> None:
        product, node = self.product, self.last
        gradient, z = node.args[:2]
        build = Builder(product, node, before=node)
        z = build.view(z, product.meta["val"].shape)
        both = build(ours.gelu_product_backward.default, *self.matrices, z, argument(node, "approximate"))
        dz, db = build.parts(both)
        replace_node(node, build.view(dz, node.meta["val"].shape))
        replace_sums(self.sums, db)
        erase_unread(gradient)


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
    """Compute activations and their gradients inside the products before them, by QuACK's kernels."""
    aliases = Aliases(step.graph)
    found = [pair for find in (_forward, _backward, gated_pairs) for pair in find(step, aliases)]
    report.matched = len(found)
    if not found:
        return
    if options.backend == "quack":
        why = quack.unavailable() if any(map(_takes, found)) else "none is in bf16 on a GPU"
        if why is not None:
            raise ValueError(f"epilogues=quack: {why}; use epilogues=torch or epilogues=auto")
    reasons: Counter[tuple[str, str]] = Counter()
    for pair in found:
        left = _why_left(pair, options)
        taken = "asked for" if options.backend == "quack" else "faster on one H200 (benchmarks/README.md)"
        where = "{}, {} x {} x {}".format(pair.what, *pair.sizes)
        reasons[where, left or f"by QuACK, {taken}"] += 1
        if left is None:
            report.changed += 1
            pair.rewrite()
    report.notes += [f"{where} ({count}): {why}" for (where, why), count in reasons.items()]
    report.summary = f"{report.changed} of {report.matched} activations and gradients inside QuACK's products"


def _forward(step: StepGraph, aliases: Aliases) -> Iterator[Pair]:
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
            yield _Forward(product, node)


def _backward(step: StepGraph, aliases: Aliases) -> Iterator[Pair]:
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
            yield _Backward(product, node, list(sums_of_rows(node, product.meta["val"].shape)))


def _takes(pair: Pair) -> bool:
    """Whether the package supports the pair: bf16, with K and N multiples of 8 (16 bytes)."""
    inputs = [node.meta["val"] for node in (*pair.matrices, pair.last)]
    return all(gelu.on_device(x) for x in inputs) and all(size % 8 == 0 for size in pair.sizes[1:])


def _why_left(pair: Pair, options: EpilogueOptions) -> str | None:
    """Why the pair is left to torch; None where it is not."""
    if not _takes(pair):
        return "not in bf16, or K or N is no multiple of 8"
    if options.backend == "quack":
        return None
    M, K, N = pair.sizes
    if not any(m <= M and least <= K <= most and n <= N for m, (least, most), n in _FASTER.get(pair.what, ())):
        return "not measured to be faster"
    if options.capability != _CAPABILITY:
        return "measured only on compute capability {}.{}".format(*_CAPABILITY)
    return quack.unavailable()


def _name(node: fx.Node) -> str:
    return "GELU by tanh" if argument(node, "approximate") == "tanh" else "GELU"

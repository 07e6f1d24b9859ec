"""The products of experts' rows by QuACK's kernels instead of torch's, where that is asked for.

Matches: `grouped_mm` and `grouped_mm_weight` in bf16 on a GPU. Before -> after: the product by torch -> the same by
QuACK. ``auto`` takes QuACK's where the package is installed and its products were measured to be faster: on one H200,
from 1,024 rows per expert on, up to 19% faster in 22 of 24 products of DeepSeek-V3's and Qwen3's shapes, 3 and 7%
slower in two (`benchmarks/h200_grouped.json`).
Tier numerics: the inner dimension is added up in blocks of another size.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.kernels import quack
from stepgraph.kernels.moe import grouped
from stepgraph.passes.contract import PassReport, StepGraph, register

ours = torch.ops.stepgraph
_PRODUCTS = (ours.grouped_mm.default, ours.grouped_mm_weight.default)

#: What was measured: the GPU's compute capability, and the fewest rows per expert.
_CAPABILITY, _ROWS = (9, 0), 1024


@dataclass(frozen=True)
class ProductOptions:
    """``backend``: of every product, or ``auto``. ``capability``: the GPU's, None where unknown; by the target."""

    backend: Literal["quack", "auto"] = "quack"
    capability: tuple[int, int] | None = None


@register(
    "grouped_products",
    "numerics",
    options=ProductOptions(),
    after=("fuse_experts", "weight_experts"),
    needs_cuda=True,
    from_options=lambda options: None if options.grouped == "torch" else {"backend": options.grouped},
    for_target=lambda options, target: replace(options, capability=target.capability),
    forecast=False,  # which knows one rate for both
)
def grouped_products(step: StepGraph, options: ProductOptions, report: PassReport) -> None:
    """Multiply the rows of experts by QuACK's kernels."""
    found = step.calling(*_PRODUCTS)
    report.matched = len(found)
    if not found:
        return
    able = [node for node in found if grouped.on_device(node.args[0].meta["val"])]
    if options.backend == "auto":
        able = _faster(able, options, report.notes)
    else:
        why = quack.unavailable() if able else "no product is in bf16 on a GPU of compute capability 9 or 10"
        if why is not None:
            raise ValueError(f"grouped=quack: {why}; allowed here: grouped=torch: choose that")
        if len(able) < len(found):
            report.notes.append(f"{len(found) - len(able)} not in bf16 stay as they are")
    for node in able:
        node.args = (*node.args[:3], "quack")
    report.changed = len(able)
    report.summary = f"{report.changed} of {report.matched} grouped products by QuACK"


def _faster(products: list[fx.Node], options: ProductOptions, notes: list[str]) -> list[fx.Node]:
    """Those of ``products`` that QuACK was measured to be faster at; why not the others."""
    large = [n for n in products if n.args[0].meta["val"].shape[0] >= _ROWS * n.args[2].meta["val"].shape[0]]
    why = None
    if not large:
        why = f"none is in bf16 with {_ROWS:,} rows per expert or more, and smaller ones were not measured"
    elif options.capability != _CAPABILITY:
        why = "QuACK's were measured on compute capability {}.{} alone".format(*_CAPABILITY)
    else:
        why = quack.unavailable()
    if why is not None:
        notes.append(f"torch's stay: {why}")
        return []
    notes.append("QuACK's were faster for such products on one H200 (benchmarks/h200_grouped.json)")
    if len(large) < len(products):
        notes.append(f"{len(products) - len(large)} of fewer than {_ROWS:,} rows per expert stay torch's")
    return large

"""Whose kernels multiply the rows of all experts: torch's, or QuACK's where the package is installed.

Matches: `grouped_mm` and `grouped_mm_weight` in bf16 on a GPU. Before -> after: the product by torch -> the same by
QuACK. ``auto`` takes QuACK on GPUs of compute capability 9, where it was measured: on one H200 it was up to 19% faster
in 22 of 24 products of DeepSeek-V3's and Qwen3's shapes, 3 and 7% slower in two (`benchmarks/h200_grouped.json`).
Tier numerics: the inner dimension is added up in blocks of another size.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.moe import grouped, quack
from stepgraph.passes.contract import PassReport, register
from stepgraph.passes.target import Target

ours = torch.ops.stepgraph
_PRODUCTS = (ours.grouped_mm.default, ours.grouped_mm_weight.default)

#: Compute capability of the GPUs that QuACK's products were measured on.
_MEASURED = (9, 0)


@dataclass(frozen=True)
class GroupedOptions:
    """``kernel``: of every grouped product, or ``auto``. ``capability``, ``simulated``: as in `Target`, which completes
    them."""

    kernel: Literal["auto", "torch", "quack"] = "auto"
    capability: tuple[int, int] | None = None
    simulated: bool = False


def _for_target(options: GroupedOptions, target: Target) -> GroupedOptions:
    return replace(options, capability=target.capability, simulated=target.simulated)


@register(
    "grouped_products",
    "numerics",
    options=GroupedOptions(),
    after=("fuse_experts", "weight_experts"),
    needs_cuda=True,
    from_options=lambda options: None if options.grouped == "torch" else {"kernel": options.grouped},
    for_target=_for_target,
    forecast=False,  # which knows one rate for both
)
def grouped_products(step: StepGraph, options: GroupedOptions, report: PassReport) -> None:
    """Multiply the rows of experts by QuACK's kernels where they are installed and were measured to be faster."""
    found = [n for target in _PRODUCTS for n in step.graph.find_nodes(op="call_function", target=target)]
    report.matched = len(found)
    if not found:
        return
    able = [node for node in found if grouped.on_device(node.args[0].meta["val"])]
    why = _refusal(options, able)
    if why is not None and options.kernel != "auto":
        raise ValueError(f"grouped={options.kernel}: {why}; allowed here: grouped=auto or torch: choose one of these")
    for node in able if why is None else ():
        node.args = (*node.args[:3], "quack")
        report.changed += 1
    report.summary = f"{report.changed} of {report.matched} grouped products by QuACK"
    if why is not None:
        report.notes.append(f"all by torch: {why}")
    elif len(able) < len(found):
        report.notes.append(f"{len(found) - len(able)} not in bf16 stay as they are")


def _refusal(options: GroupedOptions, able: list[fx.Node]) -> str | None:
    """Why QuACK multiplies nothing, in one line, or None."""
    if options.kernel == "auto" and options.capability != _MEASURED:
        return "QuACK's products were measured on compute capability 9.0 alone"
    if not able:
        return "no product is in bf16 on a GPU of compute capability 9 or 10"
    return quack.unavailable()

"""What to carry from forward to backward under a compiler: the fewest bytes from which the rest is rebuilt for free.

A compiler fuses cheap operators into the kernels that read their results, so in backward they cost arithmetic and no
memory traffic. Before -> after: backward reads ``silu(g)`` that forward wrote -> backward reads ``g`` and computes
``silu`` where it needs it. The choice is a minimum cut of the forward graph: every path from what cannot be computed
again (matrix products, attention, random numbers) to what backward reads is cut at results whose bytes sum to the
least. Exact, since the same operators run on the same values. Kept in any case: reductions, whose kernels are not free
to fuse, what backward hands to a matrix product or attention, which would have to be written anyway, and what leaves a
repeated block. Preconditions: Inductor comes after it, on a GPU.
Source: the idea of torch's min-cut partitioner (He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by
being Fusion Aware, 2023), here on the step's own phases.
"""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.facts import is_launch
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.inductor.regional import region_of, tag
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.memory.recompute import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class RematerializeOptions:
    """``regions``: only what a tagged region made and only such regions read in backward, which then compute it
    themselves; outside nothing is fused."""

    regions: bool = False


@register(
    "rematerialize",
    "exact",
    options=RematerializeOptions(),
    after=("recompute", "fuse_norm", "fuse_loss", "tag_regions"),
    serves="inductor",
    needs_cuda=True,  # a CPU would pay for computing again
    from_options=lambda options: {"regions": options.inductor == "regional"} if options.inductor != "off" else None,
)
def carry_least(step: StepGraph, options: RematerializeOptions, report: PassReport) -> None:
    """Carry the fewest bytes from forward to backward, and compute the rest again inside backward's kernels."""
    again, before, after = rematerialize(step, regions=options.regions)
    report.matched = report.changed = again
    report.summary = (
        f"{again} cheap nodes recomputed inside backward's kernels; carried from forward to backward "
        f"{after / 2**20:.0f} of {before / 2**20:.0f} MiB"
    )


def rematerialize(step: StepGraph, *, regions: bool = False) -> tuple[int, int, int]:
    """Rewrite the step; (nodes computed again, bytes carried before, bytes carried after).

    The loss counts as backward: its gradient follows at once and shares its kernels. ``regions``: as in
    `RematerializeOptions`.
    """
    plan = Plan(step, forward=("forward",))
    before = plan.kept_bytes(set())
    dropped = plan.cut(_repeatable(plan, regions))
    after = plan.kept_bytes(dropped)
    added = plan.rewrite(dropped)
    if regions:
        known = set(plan.nodes)
        for node in reversed(step.graph.nodes):
            if node not in known:
                tag([node], region_of(next(iter(node.users))))
    return added, before, after


def _repeatable(plan: Plan, regions: bool) -> set[fx.Node]:
    """The roots that may be computed again; with ``regions`` only what lies between two of them."""
    found = {root for root in plan.candidates() if not plan.is_expensive(root) and not _reduces(plan, root)}
    found = {root for root in found if not root.meta.get(KEEP_EAGER)}  # those are kernels of their own
    # Backward would need the last sum of a residual stream first, and with it all earlier ones at once.
    found = {root for root in found if not plan.leaves_block(root)}
    if regions:
        found = {root for root in found if _between_regions(plan, root)}
    return {root for root in found if not _feeds_product(plan, root)}


def _reduces(plan: Plan, root: fx.Node) -> bool:
    """Whether the operator behind ``root`` makes, among other results, something smaller than what it reads."""
    op = plan.operator(root)
    made, read = _sizes([op]), _sizes(op.all_input_nodes)
    return bool(made and read) and min(made) < max(read)


def _between_regions(plan: Plan, root: fx.Node) -> bool:
    """Whether a region made the result and nothing else reads it in backward."""
    readers = (user for alias in plan.alias_nodes(root) for user in alias.users if plan.is_backward(user))
    return region_of(root) is not None and all(region_of(user) is not None for user in readers)


def _sizes(nodes: list[fx.Node]) -> list[int]:
    given = [n.meta.get("val") for n in nodes]
    values = [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [value.numel() for value in values if isinstance(value, torch.Tensor)]


def _is_ours(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "stepgraph"


def _feeds_product(plan: Plan, root: fx.Node) -> bool:
    """Whether a matrix product, attention, or kernel of ours or the model's own in backward reads it, so that it must
    lie in memory."""
    return any(
        plan.is_backward(user)
        and (plan.is_expensive(user) or "attention" in str(user.target) or _is_ours(user) or is_launch(user))
        for alias in plan.alias_nodes(root)
        for user in alias.users
    )

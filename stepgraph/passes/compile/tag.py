"""Tags the regions that regional Inductor compiles.

Matches: what `regions` finds. Before -> after: nodes -> the same nodes, tagged. Tier exact: nothing is rewritten.
"""

from dataclasses import dataclass

from stepgraph.errors import unknown_name
from stepgraph.passes.compile.regions import MATCHERS, tag_regions
from stepgraph.passes.contract import PassReport, StepGraph, register


@dataclass(frozen=True)
class TagOptions:
    """``kinds``: the kinds of region to look for."""

    kinds: tuple[str, ...] = tuple(MATCHERS)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in MATCHERS:
                raise unknown_name("kind of region", kind, MATCHERS)


@register(
    "tag_regions",
    "exact",
    options=TagOptions(),
    after=("fuse_norm",),
    serves="inductor",
    from_options=lambda options: {} if options.inductor == "regional" else None,
    forecast=False,  # a forecast of regional compilation counts each operator by itself
)
def tag(step: StepGraph, options: TagOptions, report: PassReport) -> None:
    """Tag rotations, gated products and FlexAttention as regions to compile."""
    found = tag_regions(step, options.kinds)
    report.matched = report.changed = sum(found.values())
    report.summary = f"{report.matched} regions to compile"
    counts = ", ".join(f"{kind} {count or 'found nothing'}" for kind, count in found.items())
    report.notes.append(f"regions: {counts}")

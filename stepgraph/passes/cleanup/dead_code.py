"""Removes nodes that nothing reads. Exact."""

from stepgraph.graph.facts import is_pure
from stepgraph.passes.contract import PassReport, StepGraph, register


@register("dead_code", "exact")
def dead_code(step: StepGraph, options: object, report: PassReport) -> None:
    """Remove nodes whose result nothing uses, except the ones that write or draw random numbers."""
    report.matched = len(step.graph.nodes)
    for node in reversed(list(step.graph.nodes)):
        if not node.users and is_pure(node):
            step.graph.erase_node(node)
            report.changed += 1
    report.summary = f"{report.changed} unused nodes removed"

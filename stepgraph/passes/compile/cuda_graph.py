"""CUDA graphs: the whole step as one launch.

Matches: every node. Before -> after: the step's kernels, launched one by one -> one replay of a recorded graph.
Exact: the same kernels run in the same order. Preconditions: CUDA tensors. State stays where it is and is the
graph's static memory; the batch is copied into static buffers. A node that needs the host ends one graph and
starts another around it; the report names it. Collectives are recorded too: each waits for what it reads and is waited
for by streams' events, and the first step, which is not recorded, opens their communicators and workspaces.

A graph of a pipeline that keeps values for another is not recorded: where they lie changes from call to call.

The pass says where the graphs begin and end; `stepgraph.run.cuda_graph` records and replays them.
"""

from collections.abc import Set

from torch import fx

from stepgraph.graph.partition import describe, needs_host, split
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.contract import PassReport, register


@register(
    "cuda_graph",
    "exact",
    after=("inductor",),
    terminal=True,
    needs_cuda=True,
    from_options=lambda options: {} if options.cuda_graph else None,
    forecast=False,  # launches take no time in a forecast
)
def cuda_graph(step: StepGraph, options: object, report: PassReport) -> None:
    """Record the step as CUDA graphs: the first call runs it plainly, the second records, later ones replay."""
    if step.keeps_values:
        report.skipped = "what a stage keeps for its backward lies elsewhere for each microbatch"
        return
    report.matched = sum(1 for _ in step.nodes())
    step.recording = report
    split_at_host(step)


def split_at_host(step: StepGraph, waiting: Set[str] = frozenset()) -> fx.GraphModule:
    """``step.executable`` in pieces with the ``group`` "device", each to become one CUDA graph, or "host"; the report
    says which nodes stay on the host and why. ``waiting``: names of nodes that were seen to wait for the GPU."""
    reasons: dict[fx.Node, str] = {}

    def group(node: fx.Node) -> str:
        reason = "it waits for the GPU" if node.name in waiting else needs_host(node)
        if reason:
            reasons[node] = reason
        return "host" if reason else "device"

    module, report = split(step.executable, group), step.recording
    report.notes = [f"outside the CUDA graph: {describe(node)}: {reason}" for node, reason in reasons.items()]
    step.on_host = {node.name: reason for node, reason in reasons.items()}
    pieces = sum(piece.group == "device" for piece in module.children())
    report.changed = report.matched - len(reasons)
    report.summary = f"{pieces} CUDA graph{'s' * (pieces != 1)}, {len(reasons)} nodes on the host"
    return module

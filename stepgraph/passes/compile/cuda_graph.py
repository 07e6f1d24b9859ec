"""CUDA graphs: the whole step as one launch.

Matches: every node. Before -> after: the step's kernels, launched one by one -> one replay of a recorded graph.
Exact: the same kernels run in the same order. Preconditions: CUDA tensors. State stays where it is and is the
graph's static memory; the batch is copied into static buffers. A node that needs the host ends one graph and
starts another around it; the report names it. Collectives are recorded too: each waits for what it reads and is waited
for by streams' events, and the first step, which is not recorded, opens their communicators and workspaces.

All calls of a rank of a pipeline become one CUDA graph where none needs the host (`record_whole`). A graph that
keeps values for another is recorded in no other way: where they lie changes from call to call.

The pass says where the graphs begin and end; `stepgraph.run.cuda_graph` records and replays them.
"""

from collections import Counter
from collections.abc import Set

from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_mutating, is_random
from stepgraph.graph.partition import describe, needs_host, split, tensors_of
from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import BatchLeaf
from stepgraph.passes.contract import PassReport, StepGraph, register

_KEEPS = "what a stage keeps for its backward lies elsewhere for each microbatch"


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
    if step.keeps_values:  # unless `record_whole` finds that they all become one graph
        report.skipped = _KEEPS
        return
    if writes_into_shared(step):
        report.skipped = (
            "it writes into memory that a tensor of the batch shares with another input; static buffers do not share it"
        )
        return
    report.matched = sum(1 for _ in step.nodes())
    step.recording = report
    split_at_host(step)


def writes_into_shared(step: StepGraph) -> bool:
    """Whether the step writes into a tensor of the batch that shares memory with another input."""
    aliases = Aliases(step.graph)
    sharing = Counter(map(aliases.root, step.placeholders()))
    return any(aliases.writes.get(n) and sharing[aliases.root(n)] > 1 for n in step.placeholders(BatchLeaf))


def split_at_host(step: StepGraph, waiting: Set[str] = frozenset()) -> fx.GraphModule:
    """``step.executable`` in pieces with the ``group`` "device", each to become one CUDA graph, or "host"; the report
    says which nodes stay on the host and why. ``waiting``: names of nodes that were seen to wait for the GPU."""
    _host_first(step.executable.graph)
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


def _host_first(graph: fx.Graph) -> None:
    """Move nodes that only the host runs, such as its random draws, to the front, where they split no CUDA graph."""
    moved: set[fx.Node] = set()
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in list(graph.nodes):
        devices = {tensor.device.type for tensor in tensors_of(node)}
        alone = node.op == "call_function" and devices == {"cpu"} and moved.issuperset(node.all_input_nodes)
        if alone and not is_mutating(node):
            moved.add(node)
            if node is first:
                first = node.next
            else:
                first.prepend(node)
        elif "cpu" in devices and (node.op == "call_module" or is_mutating(node) or is_random(node)):
            return  # what comes later may read what it writes, and draws after it


def record_whole(program: StepProgram, gpu: str = "cuda") -> None:
    """After passes: let all calls of a pipeline's step be one CUDA graph, if the pass ran for every graph and nothing
    in them needs the host; the reports say so, or why not. ``gpu``: the type of device that counts as the GPU."""
    reports = {name: report for name, step in program.graphs.items() if (report := _report_of(step)) is not None}
    keeping = [name for name, report in reports.items() if report.skipped == _KEEPS]
    if not keeping or any(report.skipped not in (None, _KEEPS) for report in reports.values()):
        return
    if reason := _needs_host(program, gpu):
        record_apart(program, reason)
        return
    for name, report in reports.items():
        step = program.graphs[name]
        report.matched = report.changed = sum(1 for _ in step.nodes())
        report.skipped, report.notes, report.summary = None, [], "part of the single CUDA graph of this rank's step"
        step.recording, step.on_host = report, {}


def record_apart(program: StepProgram, reason: str) -> None:
    """One CUDA graph for each graph of ``program`` that keeps no values for others; the others' reports give the
    ``reason`` why the step is not one."""
    for step in program.graphs.values():
        report = _report_of(step)
        if report is not None and step.keeps_values:
            step.recording = None
            report.summary, report.matched, report.changed = "", 0, 0
            report.skipped = f"{_KEEPS}, and the step is not one CUDA graph: {reason}"


def _report_of(step: StepGraph) -> PassReport | None:
    return next((report for report in reversed(step.log) if report.name == "cuda_graph"), None)


def _needs_host(program: StepProgram, gpu: str) -> str | None:
    """Why the step cannot be one CUDA graph, or None."""
    for name, step in program.graphs.items():
        for node in step.executable.graph.nodes:
            if reason := needs_host(node, gpu):
                return f"{describe(node)} of {name}: {reason}"
        writes = Aliases(step.graph).writes
        for node, what in step.bound():
            if isinstance(what, BatchLeaf) and (what.part is not None or writes.get(node)):
                return f"{name} reads a batch of wrapped tensors, or writes into it"
    return None

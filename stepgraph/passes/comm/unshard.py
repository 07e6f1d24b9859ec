"""Gathered parameters: gather each once, and gather again in backward instead of keeping it.

`dedupe_unshards`. Matches: all-gathers of one parameter in forward, or in backward (tied embeddings).
Before -> after: two all-gathers -> the first. Exact: a gather is a copy, and no parameter is written in between.
`reshard_after_forward`. Matches: parameters gathered in forward that backward reads. Before -> after: backward reads
the forward's gather -> it reads a gather of its own, issued before its first reader. Exact for the same reason.
Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.errors import unknown_name
from stepgraph.graph.collectives import ALL_REDUCE, WAIT, Collective, by_region, gathers, halves
from stepgraph.graph.edit import erase_unread
from stepgraph.graph.facts import is_pure, tensor_bytes, upstream
from stepgraph.graph.provenance import phase_of, provenance, set_provenance
from stepgraph.graph.values import Parameter
from stepgraph.passes.contract import PassReport, StepGraph, Target, register

RESHARD = ("never", "always", "auto")

B = TypeVar("B", bound="Budget")


@register("dedupe_unshards", "exact", needs_process_group=True)
def dedupe_unshards(step: StepGraph, options: object, report: PassReport) -> None:
    """Gather a parameter that is read in several places once per forward or backward."""
    saved = 0
    first: dict[tuple, fx.Node] = {}
    for gather in gathers(step):
        report.matched += 1
        key = (gather.half, recipe(gather.node))
        if key not in first:
            first[key] = gather.wait
            continue
        saved += tensor_bytes(gather.node)
        gather.wait.replace_all_uses_with(first[key])
        erase_unread(gather.wait, collectives=True)
        report.changed += 1
    report.summary = f"{report.changed} of {report.matched} gathers repeated, {saved / 2**20:.1f} MiB"


def recipe(node: fx.Node) -> tuple:
    """How ``node`` is made from inputs: equal for nodes that hold equal values."""
    if node.op != "call_function":
        return (node,)
    args = fx.map_arg(node.args, lambda n: n)
    return (node.target, *(recipe(a) if isinstance(a, fx.Node) else str(a) for a in args), str(node.kwargs))


@dataclass(frozen=True)
class Budget:
    """``budget_gib``: what the step may need, with all microbatches that a pipeline has in flight, GiB; 0: nine tenths
    of the GPU's memory."""

    budget_gib: float = 0.0


@dataclass(frozen=True)
class ReshardOptions(Budget):
    """``policy``: ``always`` gathers again in backward, ``never`` keeps what forward gathered, ``auto`` gathers again
    where the step would otherwise need more than its budget."""

    policy: str = "auto"

    def __post_init__(self) -> None:
        if self.policy not in RESHARD:
            raise unknown_name("reshard policy", self.policy, RESHARD)


def for_gpu(options: B, target: Target) -> B:
    """``options`` with the budget of ``target``."""
    known = options.budget_gib or not target.memory
    return options if known else replace(options, budget_gib=0.9 * target.memory / 2**30)


def fits(need: int, options: Budget, what: str, report: PassReport) -> bool:
    """Whether a step that needs this many bytes with ``what`` is within its budget; true where none is known."""
    if options.budget_gib:
        report.notes.append(f"the step needs about {need / 2**30:.2f} GiB of {options.budget_gib:.2f} with {what}")
    return not options.budget_gib or need <= options.budget_gib * 2**30


@register(
    "reshard_after_forward",
    "exact",
    options=ReshardOptions(),
    after=("dedupe_unshards",),
    needs_process_group=True,
    from_options=lambda options: {"policy": options.reshard},
    for_target=for_gpu,
)
def reshard_after_forward(step: StepGraph, options: ReshardOptions, report: PassReport) -> None:
    """Gather parameters again in backward instead of keeping them, by a memory policy."""
    half = halves(step.graph)
    groups = [g for g in by_region(gathers(step)) if g[0].half == "forward"]
    plans = [[(gather, readers) for gather in g if (readers := _readers(gather, half))] for g in groups]
    report.matched = sum(map(len, plans))
    report.summary = f"policy {options.policy}: {report.matched} gathered parameters kept for backward"
    if not report.matched or not _wanted(step, options, report):
        return
    # Backward starts where forward ended: freeing that would gather it again at once.
    last = groups[-1][0].region
    freed = 0
    for plan in plans:
        for gather, (made, readers) in plan:
            if gather.region == last:
                continue
            _gather_again(step.graph, made, readers)
            freed += tensor_bytes(gather.node)
            report.changed += 1
    report.summary = (
        f"policy {options.policy}: {report.changed} of {report.matched} parameters gathered again in backward, "
        f"{freed / 2**20:.1f} MiB not kept"
    )
    report.notes.append("the last region keeps its parameters: backward starts with it")


def _wanted(step: StepGraph, options: ReshardOptions, report: PassReport) -> bool:
    if options.policy != "auto":
        return options.policy == "always"
    if not options.budget_gib:
        device = step.placeholders(Parameter)[0].meta["val"].device
        report.notes.append(f"no memory budget is known on {device.type}: nothing is gathered again")
        return False
    estimate = estimate_memory(step.graph)
    need = estimate.peak + (step.in_flight - 1) * estimate.saved
    return not fits(need, options, "all of them kept", report)


def _readers(gather: Collective, half: dict[fx.Node, str]) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """(what forward makes only from the gathered parameter, backward's readers of these, in order), if any read."""
    made = [gather.wait]
    seen = set(made)
    for node in made:  # grows
        for user in node.users:
            forward = user not in seen and is_pure(user) and half.get(user) == gather.half
            if forward and seen.issuperset(user.all_input_nodes):
                made.append(user)
                seen.add(user)
    readers = {u: None for n in made for u in n.users if phase_of(u) == "backward" and u not in seen}
    return (made, sorted(readers)) if readers else None


def _gather_again(graph: fx.Graph, made: list[fx.Node], readers: list[fx.Node]) -> None:
    """Copies of a gather and of the nodes ``made`` from it, for backward's readers."""
    read = [n for n in made if any(user in readers for user in n.users)]
    # What ranks also agreed on, such as the scales of fp8 weights, is kept.
    sources = set(read).union(*map(upstream, read))
    agreed = {n for n in sources if n.target is WAIT and n.args[0].target is ALL_REDUCE}
    needed = set(read).union(*(upstream(n, agreed) for n in read)) - agreed
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(readers[0]):
        for node in sorted(needed):
            if node.op != "call_function":
                continue
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
            set_provenance(copy, provenance(node)._replace(phase="backward"))
            copies[node] = copy
    for reader in readers:
        for source in reader.all_input_nodes:
            if source in copies:
                reader.replace_input_with(source, copies[source])
    for node in reversed(made):
        if not node.users:
            graph.erase_node(node)

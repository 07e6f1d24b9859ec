"""Collectives of parameters that all microbatches of a pipeline's step share: they leave the graph of a microbatch.

`gather_once`. Matches: gathers of parameters. Before -> after: each microbatch gathers -> it reads what
``step.once[Kind.GATHER]`` gathered before the first one. Exact: a gather is a copy, and no parameter is written before
the last microbatch is done. It takes no more memory than one microbatch's gathers that are kept for its backward, and
of a pipeline several microbatches are in flight.

`reduce_once`. Matches: gradients that are reduced before they are added to an accumulator. Before -> after:
    sum += finish(reduce(g)) -> whole += g; and once, in ``step.once[Kind.REDUCE]``: sum += finish(reduce(whole))
Tier numerics: sums go over microbatches first, in their order, and then over ranks; ``whole`` has the dtype of the
parameter where that is the more exact one. It takes memory for a whole gradient of each parameter.

Without a pipeline, later microbatches' collectives overlap with the computation of earlier ones, and both are left.
Source: PyTorch's ``FSDPModule.set_requires_gradient_sync`` and ``set_reshard_after_backward``, which do so by hand.
"""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.collectives import gathers, tail
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import is_pure, is_view, tensor_bytes, upstream
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.stages import extract, new_input
from stepgraph.graph.step_graph import Kind
from stepgraph.graph.values import Accumulator, Parameter, Value
from stepgraph.passes.comm.unshard import Budget, ReshardOptions, fits, for_gpu, recipe
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten

_ALONE = "the step has no pipeline with several microbatches in flight"


@register(
    "gather_once",
    "exact",
    options=ReshardOptions(),
    after=("dedupe_unshards",),
    needs_process_group=True,
    from_options=lambda options: {"policy": options.reshard},
    for_target=for_gpu,
)
def gather_once(step: StepGraph, options: ReshardOptions, report: PassReport) -> None:
    """Gather parameters once for all microbatches of a pipeline, by the memory policy."""
    if step.in_flight < 2:
        report.skipped = _ALONE
        return
    parameters = set(step.placeholders(Parameter))
    found = {g.wait: _ends(g.wait) for g in gathers(step) if _placeholders(g.node) <= parameters}
    report.matched = len(found)
    report.summary = f"policy {options.policy}: each microbatch gathers {len(found)} parameters"
    if not found or options.policy == "always":
        return
    ends = [end for read in found.values() for end in read]
    estimate = estimate_memory(step.graph)
    kept = sum(tensor_bytes(end) for end in ends if any(phase_of(user) == "backward" for user in end.users))
    need = estimate.peak + (step.in_flight - 1) * max(0, estimate.saved - kept)
    if options.policy == "auto" and not fits(need, options, "parameters gathered once", report):
        return
    outputs: dict[tuple, tuple[Value, fx.Node]] = {}  # one for ends that hold equal values
    for end in ends:
        outputs.setdefault(recipe(end), (Value(f"once.{end.name}", step.stage), end))
    needed = {n for _, end in outputs.values() for n in (end, *upstream(end)) if n.op == "call_function"}
    step.once = step.once | {Kind.GATHER: extract(step, needed, list(outputs.values()), lambda node: Value(node.name))}
    given = {key: new_input(step, value, end, end.meta["val"]) for key, (value, end) in outputs.items()}
    for end, key in [(end, recipe(end)) for end in ends]:
        end.replace_all_uses_with(given[key])
    erase_unread(*ends, collectives=True)
    report.changed = len(found)
    size = sum(map(tensor_bytes, given.values()))
    report.summary = f"{len(found)} gathers once for all microbatches; {size / 2**20:.1f} MiB held over the step"


def _placeholders(node: fx.Node) -> set[fx.Node]:
    return {n for n in upstream(node) if n.op == "placeholder"}


def _ends(wait: fx.Node) -> list[fx.Node]:
    """What a microbatch reads of a gathered parameter: itself, and what is computed only from it. Views of these are
    the microbatch's own: they cost nothing, and other passes know them by their form."""
    made, seen = [wait], {wait}
    for node in made:  # grows
        for user in node.users:
            if user not in seen and is_pure(user) and seen.issuperset(user.all_input_nodes):
                made.append(user)
                seen.add(user)
    ends: dict[fx.Node, None] = {}
    for node in made:
        if any(user not in seen for user in node.users):
            while node is not wait and is_view(node):
                node = node.args[0]
            ends[node] = None
    return list(ends)


@register(
    "reduce_once",
    "numerics",
    options=Budget(),
    after=("dedupe_unshards", "gather_once"),
    needs_process_group=True,
    for_target=for_gpu,
)
def reduce_once(step: StepGraph, options: Budget, report: PassReport) -> None:
    """Reduce gradients once, after the last microbatch of a pipeline, where memory allows."""
    if step.in_flight < 2:
        report.skipped = _ALONE
        return
    found = _sums_of_reduced(step)
    report.matched = len(found)
    report.summary = f"each microbatch reduces {len(found)} gradients"
    wholes = [whole for s in found for whole in s.wholes]
    size = sum(whole.nbytes for _, whole in wholes)
    estimate = estimate_memory(step.graph)
    need = estimate.peak + (step.in_flight - 1) * estimate.saved + size
    if not found or not fits(need, options, "sums of whole gradients", report):
        return
    lifted: set[fx.Node] = set()
    for s in found:
        lifted |= _add_wholes(step, s) | {*s.chain, s.add}
    step.once = step.once | {Kind.REDUCE: extract(step, lifted, [], lambda node: Value(node.name))}
    for node in sorted(lifted, reverse=True):
        step.graph.erase_node(node)
    report.changed = len(found)
    report.summary = f"{len(found)} gradients reduced once for all microbatches; {size / 2**20:.1f} MiB of whole sums"


@dataclass(frozen=True)
class _Sum:
    """The addition ``add`` of a reduced gradient to the accumulator of ``parameter``. ``chain``: what reduces and
    finishes it, in order. ``wholes``: the chain's inputs, each with the form of its sum over microbatches."""

    parameter: str
    add: fx.Node
    chain: list[fx.Node]
    wholes: list[tuple[fx.Node, torch.Tensor]]


def _sums_of_reduced(step: StepGraph) -> list[_Sum]:
    finishing, found = tail(step), []
    for node, what in step.bound():
        for add in node.users if isinstance(what, Accumulator) else ():
            chain = sorted({add.args[1], *upstream(add.args[1])} & finishing)
            read = dict.fromkeys(n for c in chain for n in c.all_input_nodes if n not in chain)
            if chain and all(n.op == "call_function" for n in read):
                dtype = node.meta["val"].dtype
                found.append(_Sum(what.parameter, add, chain, [(n, _like(n.meta["val"], dtype)) for n in read]))
    return found


def _like(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum of ``grad`` over microbatches, at least as exact as an accumulator of ``dtype``."""
    with grad.fake_mode:
        return torch.empty_like(grad, dtype=torch.promote_types(grad.dtype, dtype))


def _add_wholes(step: StepGraph, s: _Sum) -> set[fx.Node]:
    """Add what the chain reads to accumulators, which it reads instead; the casts for that."""
    casts = set()
    for i, (grad, like) in enumerate(s.wholes):
        first = next(node for node in s.chain if grad in node.all_input_nodes)
        whole = new_input(step, Accumulator(s.parameter, (step.stage, i)), grad, like)
        build = Builder(grad, before=first)
        build(aten.add_.Tensor, whole, grad)
        source = build.cast(whole, grad.meta["val"].dtype)
        casts |= {source} - {whole}
        for node in s.chain:
            node.replace_input_with(grad, source)
    return casts

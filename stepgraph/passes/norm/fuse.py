"""Runs each RMS and layer norm the fastest way: our kernels, Inductor, or eager's.

Matches: every norm of rows, forward and backward, fused or composite (see `composite`). Before -> after, where our
kernels are chosen: the residual add, the norm and its casts -> ``stepgraph::norm``; its backward and the addition of
the residual stream's gradient -> ``stepgraph::norm_backward``; the norms of queries and keys -> one operator. Where
Inductor is chosen the graph stays, and the norm with its pointwise neighbours is marked as a region; where eager is
chosen it is marked to be left out of Inductor.
Tier numerics: the kernels round once where a composite rounds several times, and sum in another order. From run to
run their results are bitwise equal. Preconditions: a flat graph with phases, before Inductor.
Source: the idea of torchtitan pull request 3132.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import fx

from stepgraph.costs.norms import Traffic, cost
from stepgraph.errors import unknown_name
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.facts import is_pointwise, is_view, tensor_bytes
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.graph.provenance import phase_of
from stepgraph.inductor.regional import KEY, Region
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.norm.composite import find
from stepgraph.passes.norm.rewrite import Found, Rewriter, added, unsupported
from stepgraph.passes.norm.values import value_of

Choice = Literal["auto", "kernel", "inductor", "eager"]

#: Notes of one kind beyond this number are only counted.
_NOTES = 8


@dataclass(frozen=True)
class FuseNormOptions:
    """``choice``: how norms run; ``auto`` takes the cheapest for each (see `stepgraph.costs.norms`), and
    on a CPU leaves them as they are. ``compiled``: whether Inductor comes after, so that it can be chosen. ``on_gpu``:
    the step runs, or is forecast to run, on a GPU."""

    choice: Choice = "auto"
    compiled: bool = True
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise unknown_name("choice of norm", self.choice, get_args(Choice))


@register(
    "fuse_norm",
    "numerics",
    options=FuseNormOptions(),
    from_options=lambda options: {"choice": options.norm, "compiled": options.inductor != "off"},
    for_target=lambda options, target: replace(options, on_gpu=target.device == "cuda"),
)
def fuse_norm(step: StepGraph, options: FuseNormOptions, report: PassReport) -> None:
    """Run each RMS and layer norm in our kernels, Inductor or eager, whichever is fastest."""
    norms, left = [], []
    for found in find(step.graph):
        if isinstance(found, Found):
            norms.append(found)
        else:
            left.append(f"{found.root.name} is not a norm that this pass knows: {found.why}")
    aliases = Aliases(step.graph) if norms else None
    forms, chosen = Counter(), Counter()
    kernels, regions = [], []
    choices: dict[fx.Node, str] = {}
    for found in norms:
        forms[found.form, "forward"] += bool(found.outputs)
        forms[found.form, "backward"] += found.gradient is not None
        why = unsupported(found, aliases)
        choice = _choose(found, options, can_use_kernel=why is None)
        if not found.outputs and found.original:  # its backward reads the statistics of the first time
            first = choices.get(found.original.root, choice)
            choice = first if first != "kernel" or why is None else choice
        choices[found.root] = choice
        chosen[choice] += 1
        if choice == "kernel":
            kernels.append(found)
        elif options.choice == "kernel":
            left.append(f"{found.root.name} is left unchanged: {why}")
        if choice == "inductor":
            regions.append(found)
        elif choice == "eager" and options.choice == "eager":
            _mark_eager(found)
    _mark_regions(regions)
    details = _rewrite(step, kernels, aliases) if kernels else ""
    report.matched, report.changed = len(norms), len(kernels)
    report.summary = (
        f"{len(norms)} norm{'s' * (len(norms) != 1)}: "
        + ", ".join(f"{n} by {_WORDS[name]}" for name, n in sorted(chosen.items(), key=lambda c: -c[1]))
        + details
    )
    for form in dict.fromkeys(form for form, _ in forms):
        report.notes.append(f"{form}: {forms[form, 'forward']} forward, {forms[form, 'backward']} backward")
    if not norms:
        report.notes.append("no RMS or layer norm found")
    report.notes += left[:_NOTES]
    if len(left) > _NOTES:
        report.notes.append(f"and {len(left) - _NOTES} more left unchanged")


_WORDS = {"kernel": "our kernels", "inductor": "Inductor", "eager": "eager's operators"}


def _choose(found: Found, options: FuseNormOptions, *, can_use_kernel: bool) -> str:
    """``kernel``, ``inductor`` or ``eager`` for one norm."""
    left = "inductor" if options.compiled else "eager"
    if options.choice in ("inductor", "eager"):
        return options.choice if options.compiled else "eager"
    if not can_use_kernel:
        return left
    if options.choice == "kernel":
        return "kernel"
    if not options.on_gpu:
        return left
    traffic = _traffic(found)
    return min(("kernel", left), key=lambda choice: cost(choice, traffic))


def _rewrite(step: StepGraph, kernels: list[Found], aliases: Aliases) -> str:
    """Put our operators in; what they took in with them, in words."""
    rewriter = Rewriter(step, kernels, aliases)
    taken = [rewriter.rewrite(found) for found in kernels]
    rewriter.sweep()
    residuals, gradients = map(sum, zip(*taken, strict=True))
    return f"; {residuals} residual adds and {gradients} residual gradients taken in"


# Bytes


def _traffic(found: Found) -> Traffic:
    """What the norm moves."""
    x, gradient = found.x, found.gradient
    width = value_of(x).shape[-1]
    sides = added(x)
    reads = sides if sides else (x,)
    forward = sum(map(tensor_bytes, found.outputs)) + sum(map(tensor_bytes, reads)) + (tensor_bytes(x) if sides else 0)
    apart = tensor_bytes(x) if sides else 0  # the sum is read again
    backward = 0
    if gradient:
        touched = [gradient.dy, gradient.x, gradient.dx or gradient.dy]
        backward = sum(map(tensor_bytes, touched))
        if gradient.dh is not None:
            backward += tensor_bytes(gradient.dh)
            apart += 2 * tensor_bytes(gradient.dx)
    return Traffic(width, forward, backward, apart, _neighbours(found, reads))


def _neighbours(found: Found, reads: tuple[fx.Node, ...]) -> int:
    """Bytes that fusion with the norm's neighbouring pointwise operators would not move.

    A tensor that a pointwise operator makes for the norm alone is neither written nor read again; one that only
    pointwise operators read after the norm neither.
    """
    inside = set(found.nodes) | {found.x}
    made = [n for n in (*reads, found.gradient.dy if found.gradient else None) if n is not None]
    saved = sum(2 * tensor_bytes(n) for n in made if is_pointwise(n) and set(n.users) <= inside)
    results = [*found.outputs, found.gradient.dx if found.gradient else None]
    for node in results:
        if node is not None and node.users and all(is_pointwise(user) for user in node.users):
            saved += 2 * tensor_bytes(node)
    return saved


# Marks


def _mark_regions(norms: list[Found]) -> None:
    """Mark each norm with its pointwise neighbours, forward and backward apart, as regions for a compiler."""
    for nodes_of in (lambda found: found.nodes, _around):  # what is a norm's own before any neighbour
        for i, found in enumerate(norms):
            for node in nodes_of(found):
                if phase_of(node) != "optimizer":
                    part = "backward" if phase_of(node) == "backward" else "forward"
                    node.meta.setdefault(KEY, Region(f"norm.{i}.{part}", "norm"))


def _around(found: Found) -> Iterator[fx.Node]:
    """The pointwise neighbours, and views between the norm's own nodes."""
    for node in found.nodes:
        yield from filter(is_pointwise, (*node.all_input_nodes, *node.users))
        yield from (n for n in node.all_input_nodes if is_view(n) and n.args[0] in found.nodes)


def _mark_eager(found: Found) -> None:
    """Keep the norm out of Inductor."""
    for node in found.nodes:
        node.meta[KEEP_EAGER] = True

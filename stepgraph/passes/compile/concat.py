"""Concatenations whose parts Inductor computes once each, in place in the result.

    y = cat([f(x), g(x)], -1); y @ w    ->    y = concat([f(x), g(x)], -1); y @ w

Inductor fuses a concatenation with the computation of its parts. The kernel computes every part for every element and
keeps one: the gradient of a gated GELU takes four times as long as its memory traffic would. `concat` is compiled to a
buffer instead, and each part is written to its place in it, by one kernel if all parts have one size.
Matches `cat` and `stack` of parts of one shape, or of large ones, at least one of them computed by Inductor, that no
kernel of Inductor reads. Tier exact: no operator computes anything else. Preconditions: a GPU, the whole graph
compiled, one dtype.
"""

from torch import fx

from stepgraph.costs.roofline import Fusion
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import aten, is_view, ours, packet
from stepgraph.passes.contract import PassReport, StepGraph, register

#: The fewest elements of the result for which it is replaced: a smaller one fits in the cache.
_LEAST = 1 << 22

#: The fewest elements of a part of another size, for which a kernel is launched of its own.
_LEAST_OF_PART = 1 << 20


@register(
    "concat_in_place",
    "exact",
    after=("gelu_kernels",),
    serves="inductor",
    needs_cuda=True,
    from_options=lambda options: {} if options.compiles_all else None,
)
def concat_in_place(step: StepGraph, options: object, report: PassReport) -> None:
    """Let Inductor write the parts of a concatenation where they lie in it."""
    found = [
        node
        for node in (*step.calling(aten.cat.default), *step.calling(aten.stack.default))
        if node.meta["val"].numel() >= _LEAST and len(node.args[0]) > 1
    ]
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, bool(found))
    for node in found:
        y, parts = node.meta["val"], list(node.args[0])
        values = [part.meta["val"] for part in parts]
        kernel = fusion.kernel(node)
        computed = any(fusion.kernel(aliases.root(part)) is kernel for part in parts)
        if not computed or any(fusion.kernel(user) is kernel for user in _readers(node)):
            continue
        even = all(v.shape == values[0].shape for v in values) or min(v.numel() for v in values) >= _LEAST_OF_PART
        fits = even and y.is_contiguous() and all(v.dtype == y.dtype for v in values)
        if not report.takes(parts if fits else "parts are small, or of several dtypes, or it is not contiguous", node):
            continue
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % y.ndim
        build = Builder(node, before=node)
        if packet(node) is aten.stack:
            parts = [build(aten.unsqueeze.default, part, dim) for part in parts]
        replace(node, build(ours.concat.default, parts, dim))
    report.summary = f"{report.changed} of {report.matched} concatenations of computed tensors written part by part"


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads ``node``, views left out."""
    return [r for user in node.users for r in (_readers(user) if is_view(user) else [user])]

"""Channels-first rows are made contiguous once, where they first appear.

A convolution over patches or frames gives (B, C, T); transposed to (B, T, C), its result keeps that order in memory,
and so does each sum of the residual stream that begins with it, to the last block: norms and sums then read and write
rows whose elements lie T apart, and a compiler of parts of the graph has to keep that. Before -> after:

    x = add(transpose(y), positions)    ->    x = add(clone(transpose(y)), positions)

and all that follows from x lies row by row. Matches what norms read (``native_layer_norm``, ``_fused_rms_norm``, means
and variances over the last dimension), through pointwise operators back to the transposed tensor. A norm that reads
this tensor itself has no stream that begins there, as in ConvNeXt, and stays.
Tier numerics: operators may add up rows in another order where these lie otherwise in memory. Preconditions: nothing
writes to the tensor, nothing random follows (which draws in the order of memory), and every operator that follows takes
the new layout.
"""

from collections.abc import Iterable

import torch
from torch import fx

from stepgraph import compat
from stepgraph.errors import first_line
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, fake_value
from stepgraph.graph.facts import is_pointwise, is_random, is_view, packet
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten
_NORMS = (aten.native_layer_norm, aten._fused_rms_norm)
_MEANS = (aten.mean, aten.var, aten.var_mean)


@register("contiguous_rows", "numerics", needs_cuda=True)
def contiguous_rows(step: StepGraph, options: object, report: PassReport) -> None:
    """Make rows of the residual stream contiguous where they begin, if they lie channel by channel."""
    aliases = Aliases(step.graph)
    rows = [x for x in map(_normalized, step.graph.nodes) if x is not None]
    norms = [x for x in rows if _lies_across(x) and not is_view(x)]
    report.matched = len(dict.fromkeys(norms))
    sources = dict.fromkeys(source for x in norms for source in _sources(x))
    for source in sources:
        why = "it is written" if aliases.writes.get(aliases.root(source)) else _make_contiguous(source)
        if why:
            report.notes.append(f"{source.name} is left unchanged: {why}")
        else:
            report.changed += 1
    left = sum(map(_lies_across, dict.fromkeys(norms)))
    report.summary = f"{report.matched - left} of {report.matched} channels-first tensors"
    report.summary += f" made contiguous, by {report.changed} copies"


def _normalized(node: fx.Node) -> fx.Node | None:
    """The rows that ``node`` takes the mean of."""
    if packet(node) in _NORMS:
        return node.args[0]
    if packet(node) in _MEANS and len(node.args) > 1 and isinstance(node.args[1], list):
        last = node.args[0].meta["val"].ndim - 1
        return node.args[0] if [d % (last + 1) for d in node.args[1]] == [last] else None
    return None


def _lies_across(node: fx.Node) -> bool:
    """Whether ``node`` is dense in memory, but the elements of its rows are not adjacent."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 3 or value.shape[-1] == 1 or not value.numel():
        return False
    dense = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.stride(-1) != 1 and dense == value.numel()


def _sources(x: fx.Node) -> Iterable[fx.Node]:
    """The views from which ``x`` has its layout, through pointwise operators."""
    seen, queue = {x}, [x]
    for node in queue:
        if is_view(node) and _lies_across(node):
            yield node
        elif is_pointwise(node) or packet(node) is aten.clone:
            more = [n for n in node.all_input_nodes if n not in seen and _lies_across(n)]
            seen.update(more)
            queue += more


def _make_contiguous(source: fx.Node) -> str | None:
    """Let all readers of ``source`` read a contiguous copy. If that is not possible, change nothing and return why."""
    copy = Builder(source, after=source).copy(source)
    source.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    before: dict[fx.Node, object] = {}
    changed, why = {copy}, None
    node = copy.next
    while node.op != "root" and why is None:
        if node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            try:
                value = fake_value(node)
            except (RuntimeError, ValueError) as error:  # a view that needs another layout
                why = f"{node.name} does not take it: {first_line(error)}"
                break
            if _form(value) != _form(node.meta["val"]):
                changed.add(node)
                why = f"{node.name} draws numbers in the order of memory" if is_random(node) else None
            before[node] = node.meta["val"]
            node.meta["val"] = value
        node = node.next
    if why:
        for node, value in before.items():
            node.meta["val"] = value
        copy.replace_all_uses_with(source)
        copy.graph.erase_node(copy)
    return why


def _form(value: object) -> list[object]:
    leaves = compat.pytree.tree_leaves(value)
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]

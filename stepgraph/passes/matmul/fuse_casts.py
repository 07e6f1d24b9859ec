"""Casts to fp8 in the kernel that makes what they read.

Matches: the casts of `fp8_matmul` by rows alone, in forward, of what a SwiGLU gives. Before -> after:
    y = silu(gate) * up; cast_scaled_rows(y)  ->  ``stepgraph::swiglu_cast_rows(gate, up)``
A row is complete in one program, so its scale and its cast read nothing again. y stays for those that read it in bf16,
as weight gradients do, and is not written where none does. The bits are those of the operators apart; what Inductor
made of them rounded less often.
Stay apart: casts with a transposed copy, whose scales by columns need all rows; casts with one scale, which needs all
of the matrix (Inductor may find it beside what makes the matrix).
Tier numerics, as `fp8_matmul`, without which it has nothing to do. Comes after recomputation, which copies operators.
"""

import operator
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.capture.lineage import MIXED, made_from
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, is_view, packet
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.kernels.fp8 import swiglu  # noqa: F401  (defines an operator of torch.ops.stepgraph)
from stepgraph.passes.contract import PassReport, register

aten, ours = torch.ops.aten, torch.ops.stepgraph

_CASTS = (ours.cast_scaled.default, ours.cast_scaled_rows.default)


class _SwiGLU(NamedTuple):
    """``product`` = silu(gate) * up."""

    product: fx.Node
    silu: fx.Node
    gate: fx.Node
    up: fx.Node


@register(
    "fuse_casts",
    "numerics",
    after=("fp8_matmul", "recompute"),
    from_options=lambda options: None if options.fp8 == "off" else {},
)
def fuse_casts(step: StepGraph, options: object, report: PassReport) -> None:
    """Cast to fp8 in the kernel that makes what is cast."""
    casts = [node for node in step.graph.nodes if node.target in _CASTS]
    report.matched = len(casts)
    if not casts:
        return
    aliases, made = Aliases(step.graph), made_from(step.graph, set(step.placeholders("parameter")))
    alone: dict[str, list[fx.Node]] = defaultdict(list)
    for cast in casts:
        if found := _match(cast, aliases):
            _rewrite(cast, found)
            report.changed += 1
        else:
            alone[_kind(cast, made[cast.args[0]])].append(cast)
    report.summary = f"{report.changed} of {report.matched} casts to fp8 in the kernel of the SwiGLU before"
    for kind, some in alone.items():
        elements = sum(cast.args[0].meta["val"].numel() for cast in some)
        report.notes.append(f"casts that stand alone, {kind}: {len(some)}, of {elements / 2**20:.1f} Mi elements")


def _kind(cast: fx.Node, parameter: fx.Node | None) -> str:
    """What the cast is of, and which copies it makes. ``parameter``: see `made_from`."""
    if parameter not in (None, MIXED):
        what = "weights"
    else:
        of_backward = phase_of(cast) == "backward" and "recomputes" not in cast.meta
        what = "output gradients" if of_backward else "activations"
    rows, columns = cast.args[-2:]
    return f"{what} {' and '.join(('by rows',) * rows + ('transposed',) * columns)}"


def _made(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a view of, in turn, as far as rows are the same rows."""
    chain = [node]
    while is_view(chain[-1]) and packet(chain[-1]) in (aten.view, aten._unsafe_view):
        source = chain[-1].args[0]
        if source.meta["val"].shape[-1:] != node.meta["val"].shape[-1:]:
            break
        chain.append(source)
    return chain


def _match(cast: fx.Node, aliases: Aliases) -> _SwiGLU | None:
    """The SwiGLU whose kernel can make ``cast``."""
    if cast.target is not ours.cast_scaled_rows.default or cast.args[2:] != (True, False):
        return None
    product = _made(cast.args[0])[-1]
    # In backward silu(gate) is a factor of the gradient of up, which shares a kernel with that of gate.
    if product.target is not aten.mul.Tensor or {phase_of(product), phase_of(cast)} != {"forward"}:
        return None
    value = product.meta["val"]
    for silu, up in (product.args, product.args[::-1]):
        if not isinstance(up, fx.Node) or getattr(silu, "target", None) is not aten.silu.default:
            continue
        (gate,) = silu.args
        alike = all((v.shape, v.dtype) == (value.shape, value.dtype) for v in (gate.meta["val"], up.meta["val"]))
        first, last = aliases.position[silu], aliases.position[cast]
        reads = (gate, silu, up, product)
        if alike and value.is_contiguous() and not any(aliases.written_between(n, first, last) for n in reads):
            return _SwiGLU(product, silu, gate, up)
    return None


def _rewrite(cast: fx.Node, found: _SwiGLU) -> None:
    """One operator in the place of the product and of its cast."""
    product = found.product
    chain = _made(cast.args[0])
    readers = zip(chain, (cast, *chain), strict=False)
    keep = any(set(node.users) != {reader} for node, reader in readers)
    build = Builder(product, found.silu, cast, before=product)
    made = build(ours.swiglu_cast_rows.default, found.gate, found.up, cast.args[1], keep)
    for i, old in getitem_users(cast).items():  # q and its scale: the copy by columns was not asked for
        old.replace_all_uses_with(build(operator.getitem, made, 1 + i, like=old))
        old.graph.erase_node(old)
    if keep:
        product.replace_all_uses_with(build(operator.getitem, made, 0, like=product))
    erase_unread(cast, product)

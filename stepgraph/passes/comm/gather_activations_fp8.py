"""Tensor parallelism gathers activations in fp8: each rank casts its part of the tokens, by the scale of all.

Matches: ``stepgraph::cast_scaled`` (see the pass `fp8_matmul`, with one scale for each matrix) of a gathered activation
or output gradient that nothing else reads. Before -> after:
    x = wait(all_gather(part)), amax(x), cast_scaled(x)
        -> amax(part), an all-reduce (max) of it; cast_scaled(part), wait(all_gather(as bytes)), and its transposed copy
           where one is read
Half the bytes travel, and a rank casts its own part alone. What DTensor puts around a gather of another dimension than
the first (split, cat) moves bytes. The same bits as without it: the largest magnitude of a matrix is the largest of its
parts', and a cast looks at each element alone. A gather stays in bf16 where the collective of the magnitude is
forecast to take longer than what is spared.
Tier numerics, as `fp8_matmul`, without which it has nothing to do. Scales by rows leave nothing to gain: rows and
columns have scales of their own, so that two casts of each matrix would travel, as many bytes as bf16 has.
"""

import operator
from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.fp8 import cast_seconds
from stepgraph.costs.hardware import ASSUMED, LAUNCH_S
from stepgraph.graph.collectives import ALL_GATHER, bytes_sent
from stepgraph.graph.edit import Builder
from stepgraph.graph.facts import tensor_bytes
from stepgraph.graph.provenance import role_of
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.comm.gather_fp8 import gather_cast, largest
from stepgraph.passes.contract import PassReport, register

aten, ours = torch.ops.aten, torch.ops.stepgraph

#: Move bytes, and compute nothing.
_MOVES = (aten.view.default, aten._unsafe_view.default, aten.split.Tensor, operator.getitem, aten.cat.default)


@dataclass(frozen=True)
class GatherActivationsFp8Options:
    """``unprofitable``: also where the forecast finds nothing to gain."""

    unprofitable: bool = False


@register(
    "gather_activations_fp8",
    "numerics",
    options=GatherActivationsFp8Options(),
    after=("fp8_matmul",),
    needs_process_group=True,
    communicates=True,
    from_options=lambda options: {} if options.fp8 == "tensorwise" else None,
)
def gather_activations_fp8(step: StepGraph, options: GatherActivationsFp8Options, report: PassReport) -> None:
    """Gather activations, and gradients of them, as the fp8 that products read."""
    left: Counter[str] = Counter()
    spared = 0.0
    for gather in step.graph.find_nodes(op="call_function", target=ALL_GATHER):
        role = role_of(gather)
        if not role or role.kind != "activation":
            continue
        report.matched += 1
        cast, moving = _cast_of(gather)
        if cast is None:
            left["something reads them in bf16"] += 1
        elif not options.unprofitable and _saves(gather, cast) <= 0:
            left["too small for a second collective to pay"] += 1
        else:
            spared += bytes_sent(gather) / 2
            _rewrite(gather, cast, moving)
            report.changed += 1
    report.summary = (
        f"{report.changed} of {report.matched} gathers of activations in fp8, a rank receives {spared / 2**20:.1f} MiB "
        f"less; {report.changed} collectives for their scales"
    )
    report.notes += [f"left in bf16, {why}: {count}" for why, count in left.items()]


def _cast_of(gather: fx.Node) -> tuple[fx.Node, list[fx.Node]] | tuple[None, None]:
    """(the cast that alone reads all of what ``gather`` gives, the nodes between, which only move it)."""
    (wait,) = gather.users
    found = [wait]
    for node in found:  # grows
        found += [user for user in node.users if user.target in _MOVES and user not in found]
    casts = {user for node in found for user in node.users if user.target is ours.cast_scaled.default}
    if len(casts) != 1:
        return None, None
    (cast,) = casts
    x, amax = cast.args[:2]
    moving = sorted(found[1:])
    inside = {*found, cast, amax}
    complete = x.meta["val"].numel() == wait.meta["val"].numel() and list(amax.users) == [cast]
    complete &= amax.target is aten.linalg_vector_norm.default and amax.args[0] is x
    alone = all(set(node.users) <= inside for node in found) and all(set(n.all_input_nodes) <= inside for n in moving)
    whole = all(len(set(node.args[0])) == len(node.args[0]) for node in moving if node.target is aten.cat.default)
    return (cast, moving) if complete and alone and whole else (None, None)


def _saves(gather: fx.Node, cast: fx.Node) -> float:
    """Seconds that a gather in fp8 is forecast to save, the casts with it."""
    (group,) = links.groups_of([gather]).values()
    elements, (rows, columns), ranks = cast.args[0].meta["val"].numel(), cast.args[3:], len(group.ranks)
    before = links.seconds(gather) + cast_seconds(elements, rows + columns, reads=2)
    fewer = links.collective_seconds(ASSUMED, "all_gather", tensor_bytes(gather) // 2, group.ranks)
    scale = links.collective_seconds(ASSUMED, "all_reduce", 4, group.ranks)
    transposed = columns * (ASSUMED.moving_seconds(2 * elements) + LAUNCH_S)
    return before - fewer - scale - cast_seconds(elements // ranks, 1, reads=2) - transposed


def _rewrite(gather: fx.Node, cast: fx.Node, moving: list[fx.Node]) -> None:
    amax = cast.args[1]
    build = Builder(amax, before=gather)
    own = build(amax.target, gather.args[0], *amax.args[1:], **amax.kwargs)
    gather_cast(gather, cast, largest(own, build, role_of(gather).axis, gather.args[2]), moving)

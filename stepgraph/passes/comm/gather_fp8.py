"""Gathers in fp8: each rank casts its part, by the scale of the whole, and half the bytes travel.

Both match ``stepgraph::cast_scaled`` (see the pass `fp8_matmul`, with one scale for each matrix) of what was gathered
and nothing else reads. The same bits as without them: the largest magnitude of a matrix is the largest of its parts',
and a cast looks at each element alone. Scales by rows leave nothing to gain: rows and columns have scales of their own,
so that two casts of each matrix would travel, as many bytes as bf16 has.

`gather_fp8`. Matches: parameters under FSDP. Before -> after:
    w = wait(all_gather(shard)), amax(w), cast_scaled(w)
        -> amax(shard) of all such weights, one all-reduce (max) of them together; cast_scaled(shard),
           wait(all_gather(as bytes)), and its transposed copy where one is read
Preconditions: shards of rows, without padding. Source: torchao's float8 all-gathers for FSDP2.

`gather_activations_fp8`. Matches: activations or output gradients under tensor parallelism. Before -> after:
    x = wait(all_gather(part)), amax(x), cast_scaled(x)
        -> amax(part), an all-reduce (max) of it; cast_scaled(part), wait(all_gather(as bytes)), and its transposed copy
           where one is read
What DTensor puts around a gather of another dimension than the first (split, cat) moves bytes. A gather stays in bf16
where the collective of the magnitude is forecast to take longer than what is spared. Tier numerics, as `fp8_matmul`,
without which it has nothing to do.
"""

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.costs import links
from stepgraph.costs.fp8 import cast_seconds
from stepgraph.costs.hardware import ASSUMED, LAUNCH_S
from stepgraph.graph.collectives import ALL_GATHER, ALL_REDUCE, WAIT, Collective, bytes_sent, gathers
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, is_pure, tensor_bytes, upstream
from stepgraph.graph.provenance import Role, role_of, set_role
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph


class _Weight(NamedTuple):
    """A gather, and the largest magnitude and the cast of what it gives."""

    gather: Collective
    amax: fx.Node
    cast: fx.Node

    @property
    def shard(self) -> fx.Node:
        return self.gather.node.args[0]


@register(
    "gather_fp8",
    "numerics",
    after=("dedupe_unshards", "fp8_matmul"),
    needs_process_group=True,
    communicates=True,
    from_options=lambda options: {} if options.fp8 == "tensorwise" else None,
)
def gather_fp8(step: StepGraph, options: object, report: PassReport) -> None:
    """Gather weights as the fp8 that products read, with the scales of all in one collective."""
    by_group: dict[str, list[_Weight]] = defaultdict(list)
    found = gathers(step)
    for gather in found:
        if weight := _match(gather):
            by_group[gather.node.args[2]].append(weight)
    report.matched = len(found)
    moved = 0
    for group, weights in by_group.items():
        amaxes = _reduced(weights, group)
        for weight, amax in zip(weights, amaxes, strict=True):
            moved += weight.gather.wait.meta["val"].nbytes
            gather_cast(weight.gather.node, weight.cast, amax, [])
        report.changed += len(weights)
    report.summary = (
        f"{report.changed} of {report.matched} gathered parameters in fp8, {moved / 2**20:.1f} MiB became "
        f"{moved / 2 / 2**20:.1f}; {len(by_group)} collectives for their scales"
    )
    if report.changed < report.matched:
        report.notes.append(f"{report.matched - report.changed} are padded, not split by rows, or read in bf16")


def _match(gather: Collective) -> _Weight | None:
    """The weight that ``gather`` gives, if nothing but its cast reads it."""
    casts = [user for user in gather.wait.users if user.target is ours.cast_scaled.default]
    if len(casts) != 1:
        return None
    amax = casts[0].args[1]
    alone = set(gather.wait.users) == {casts[0], amax} and list(amax.users) == casts
    made = upstream(gather.node)
    pure = all(is_pure(node) for node in made if node.op == "call_function")
    return _Weight(gather, amax, casts[0]) if alone and pure else None


def _reduced(weights: list[_Weight], group: str) -> list[fx.Node]:
    """The largest magnitude of each of ``weights``, in front of them all. What a shard is made of is made twice, so
    that no shard in the dtype of its product waits from here to its gather."""
    first = weights[0].gather.node
    build = Builder(*(w.gather.node for w in weights), before=first)
    own = []
    for weight in weights:
        copies: dict[fx.Node, fx.Node] = {}
        for node in sorted({*upstream(weight.shard), weight.shard}):
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, made=copies: made.get(n, n))
                copies[node] = build(node.target, *args, **kwargs, like=node)
        shard = copies.get(weight.shard, weight.shard)
        own.append(build(weight.amax.target, shard, *weight.amax.args[1:], **weight.amax.kwargs, like=weight.amax))
    stacked = build(aten.stack.default, own)
    set_role(stacked, None)
    waited = largest(stacked, build, role_of(first).axis, group)
    return [build(aten.select.int, waited, 0, i, like=w.amax) for i, w in enumerate(weights)]


def largest(magnitudes: fx.Node, build: Builder, axis: str, group: str) -> fx.Node:
    """The largest of each of ``magnitudes`` (fp32, not negative) over the ranks of ``group``; NaN where one is.

    Compared as the integers that their bits are, in whose order every NaN is above infinity: maxima of floats may drop
    it. The sign of a NaN says nothing, and goes.
    """
    bits = build(aten.bitwise_and.Scalar, build(aten.view.dtype, magnitudes, torch.int32), 0x7FFFFFFF)
    begun = build(ALL_REDUCE, bits, "max", group)
    waited = build(WAIT, begun)
    whole = build(aten.view.dtype, waited, torch.float32)
    for node in (bits, bits.args[0], whole):
        set_role(node, None)
    for node in (begun, waited):
        set_role(node, Role("activation", (), axis))
    return whole


def gather_cast(gather: fx.Node, cast: fx.Node, amax: fx.Node, moving: list[fx.Node]) -> None:
    """Cast before ``gather``, with the largest magnitude ``amax``, and transpose after it. ``moving``: the nodes that
    make what ``cast`` reads of what was gathered, and only move it, in their order."""
    (wait,), shard = gather.users, gather.args[0]
    dtype, columns = cast.args[2], cast.args[4]
    build, shape = Builder(cast, before=gather), shard.meta["val"].shape
    if not shard.meta["val"].is_contiguous():
        shard = build(aten.clone.default, shard, memory_format=torch.contiguous_format)
    rows = build.view(shard, torch.Size((shape[:-1].numel(), shape[-1])))
    result = build(ours.cast_scaled.default, rows, amax, dtype, True, False)
    scale, q = (build(operator.getitem, result, i) for i in (0, 1))
    # As bytes: not every backend of process groups knows fp8.
    q = build.view(build(aten.view.dtype, q, torch.uint8), shape)
    gathered = build(ALL_GATHER, q, *gather.args[1:], like=gather)
    moved = {wait: build(WAIT, gathered, like=wait)}
    behind = Builder(cast, before=cast)
    for old in moving:
        args, kwargs = fx.map_arg((old.args, old.kwargs), lambda n: moved[n])
        moved[old] = behind(old.target, *args, **kwargs, like=old)
    whole = behind(aten.view.dtype, moved[cast.args[0]], dtype)
    results = {0: scale, 1: whole}
    if columns:
        transposed = behind(aten.t.default, whole)
        results[2] = behind(aten.clone.default, transposed, memory_format=torch.contiguous_format)
    for i, user in getitem_users(cast).items():
        user.replace_all_uses_with(results[i])
        user.graph.erase_node(user)
    erase_unread(cast, collectives=True)


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

"""Gathers of weights in fp8: each rank casts its shard, by the scale of the whole, and half the bytes are sent.

Matches: parameters under FSDP that are read by ``stepgraph::cast_scaled`` alone (see the pass `fp8_matmul`, with one
scale for each matrix). Before -> after:
    w = wait(all_gather(shard)), amax(w), cast_scaled(w)
        -> amax(shard) of all such weights, one all-reduce (max) of them together; cast_scaled(shard),
           wait(all_gather(as bytes)), and its transposed copy where one is read
The same bits as without it: the largest magnitude of a matrix is the largest of its shards', and a cast looks at each
element alone. Scales by rows leave nothing to gain: rows and columns have scales of their own, so that two casts of
each matrix would be sent, the same number of bytes as bf16.
Tier numerics, as `fp8_matmul`, without which it has nothing to do. Preconditions: shards of rows, without padding.
Source: torchao's float8 all-gathers for FSDP2.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.graph.collectives import ALL_GATHER, ALL_REDUCE, WAIT, Collective, gathers
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, is_pure, upstream
from stepgraph.graph.provenance import Role, role_of, set_role
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph


class _Weight(NamedTuple):
    """A gather, and the largest magnitude and the cast of its result."""

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
            _gather_cast(weight, amax)
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
    """The largest magnitude of each of ``weights``, computed before the first gather. Shards are computed twice, here
    and before their gather, so that no shard in the dtype of its product stays in memory between the two."""
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
    waited = _largest(stacked, build, role_of(first).axis, group)
    return [build(aten.select.int, waited, 0, i, like=w.amax) for i, w in enumerate(weights)]


def _largest(magnitudes: fx.Node, build: Builder, axis: str, group: str) -> fx.Node:
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


def _gather_cast(weight: _Weight, amax: fx.Node) -> None:
    """Cast before the gather, with the largest magnitude ``amax``, and transpose after it."""
    gather, wait, cast, shard = weight.gather.node, weight.gather.wait, weight.cast, weight.shard
    dtype, columns = cast.args[2], cast.args[4]
    build, shape = Builder(cast, before=gather), shard.meta["val"].shape
    rows = build.view(build.contiguous(shard), torch.Size((shape[:-1].numel(), shape[-1])))
    result = build(ours.cast_scaled.default, rows, amax, dtype, True, False)
    scale, q = build.parts(result, 0, 1)
    # As bytes: not every backend of process groups knows fp8.
    q = build.view(build(aten.view.dtype, q, torch.uint8), shape)
    gathered = build(WAIT, build(ALL_GATHER, q, *gather.args[1:], like=gather), like=wait)
    behind = Builder(cast, before=cast)
    whole = behind(aten.view.dtype, gathered, dtype)
    results = {0: scale, 1: whole}
    if columns:
        results[2] = behind.copy(behind(aten.t.default, whole))
    for i, user in getitem_users(cast).items():
        user.replace_all_uses_with(results[i])
        user.graph.erase_node(user)
    erase_unread(cast, collectives=True)

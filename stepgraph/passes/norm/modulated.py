"""Backward of layer norms that each sequence scales and shifts by its own condition (adaLN), in our kernel.

    dn = mul(dy, scale + 1), dx = layer_norm_backward(dn, x), add(dh, dx)
    sum(mul(dy, n), 1), sum(dy, 1)                          ->  gated_norm_backward(dy, x, .., scale, dh, branch, gate)
    mul(dx, gate), sum(mul(dx, branch), 1), sum(mul(dx, gate), [0, 1])

n is the norm of x, (B, T, N), without weights, in forward ``n * (scale + 1) + shift``; scale and shift are (B, 1, N).
There is a gate if x is a residual plus ``gate * branch``. Saves four reads of (B, T, N) and three kernels for each
norm, and forward keeps x instead of n.
Tier numerics: nothing is rounded between these operators, and sums add in another order; the same bits in each run.
Preconditions: on a GPU, rows of at most `WIDEST` channels, one dtype for all of (B, T, N). What stays is listed with
its reason. Runs before `fuse_norm`, which takes the other norms.
Source: as `stepgraph.kernels.norm.modulated`.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases, is_written
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, only_user, other_input
from stepgraph.kernels.norm.modulated import WIDEST
from stepgraph.kernels.norm.spec import DTYPES
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.norm.values import value_of

aten, ours = torch.ops.aten, torch.ops.stepgraph
#: Notes on norms that stay.
_NOTES = 8


@dataclass
class _Modulated:
    """A norm's backward with its neighbours: the nodes that hold what the operator reads and, ``results``, gives: dx,
    dscale, dshift, and with ``branch`` and ``gate`` also dbranch, dgate and, if it is read, dbias."""

    dy: fx.Node
    x: fx.Node
    mean: fx.Node
    rstd: fx.Node
    scale: fx.Node
    offset: float
    dh: fx.Node | None
    results: list[fx.Node]
    branch: fx.Node | None = None
    gate: fx.Node | None = None

    @property
    def reads(self) -> list[fx.Node]:
        own = (self.dy, self.x, self.mean, self.rstd, self.scale, self.dh, self.branch, self.gate)
        return [node for node in own if node is not None]


@register("modulated_norm", "numerics", after=("recompute",), needs_cuda=True)
def modulated_norm(step: StepGraph, options: None, report: PassReport) -> None:
    """Run the backward of norms that are scaled and shifted by sequence, and gates before them, in our kernel."""
    gated, aliases = 0, Aliases(step.graph)
    for root in step.calling(aten.native_layer_norm_backward.default):
        found = _modulated(root)
        if found is None:
            continue
        if isinstance(found, _Modulated):
            found = _unsupported(found, aliases) or found
        if report.takes(found, root):
            _rewrite(found)
            gated += found.gate is not None
    report.summary = f"{report.changed} of {report.matched} norms scaled and shifted by sequence, {gated} with a gate"
    if len(report.notes) > _NOTES:
        report.notes[_NOTES:] = [f"and {len(report.notes) - _NOTES} more"]


def _modulated(root: fx.Node) -> _Modulated | str | None:
    """What belongs to the backward ``root`` of a norm; why it cannot be rewritten; None for one that no sequence
    scales."""
    dn, x, shape, mean, rstd, weight, bias = root.args[:7]
    found = value_of(x)
    if found.ndim != 3 or len(shape) != 1 or dn.target is not aten.mul.Tensor:
        return None
    dy, by = _by_size(dn, found.shape)
    if dy is None or by is None or value_of(by).shape != (found.shape[0], 1, found.shape[2]):
        return None
    if weight is not None or bias is not None:
        return "it has a weight too"
    if only_user(dn) is not root:
        return f"{dn.name} is read elsewhere"
    dx = getitem_users(root).get(0)
    if dx is None or len(root.users) != 1:
        return "nothing reads the gradient of its input"
    scale, offset = by, 0.0
    if by.target is aten.add.Tensor and isinstance(by.args[1], (int, float)) and not (by.kwargs or is_written(by)):
        scale, offset = by.args[0], float(by.args[1])
    normalized = {
        part
        for forward in x.users
        if forward.target is aten.native_layer_norm.default
        and mean.args[0] is rstd.args[0] is forward
        and (part := getitem_users(forward).get(0)) is not None
        and not is_written(part)
    }
    dshift = _sum_over_tokens(dy)
    dscale = next((s for n in normalized for s in _sums_of_products(dy, n)), None)
    if dshift is None or dscale is None:
        return "its scale and shift have no gradient over tokens"
    total, dh = _with_stream(dx)
    made = _Modulated(dy, x, mean, rstd, scale, offset, dh, [total, dscale, dshift])
    if gates := next(_gates(total), None):
        gated, made.gate, made.branch, dgate = gates
        made.results += [gated, dgate, *_sum_over_rows(gated)[:1]]
    return made


def _by_size(product: fx.Node, shape: torch.Size) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand of ``product`` that has ``shape``, and the other one."""
    nodes = [a for a in product.args if isinstance(a, fx.Node)]
    full = [a for a in nodes if value_of(a).shape == shape]
    rest = [a for a in nodes if a not in full]
    return (full[0], rest[0]) if len(full) == len(rest) == 1 else (None, None)


def _sum_over_tokens(node: fx.Node) -> fx.Node | None:
    """The sum of ``node``, (B, T, N), over T, that keeps the dimension."""
    for user in sorted(node.users):
        if user.target is aten.sum.dim_IntList and [d % 3 for d in user.args[1]] == [1] and user.args[2:] == (True,):
            return user
    return None


def _sum_over_rows(node: fx.Node) -> list[fx.Node]:
    """Sums of all rows of ``node``, also through views that keep its rows."""
    width, found = value_of(node).shape[-1], []
    for user in sorted(node.users):
        if user.target in (aten.view.default, aten._unsafe_view.default) and value_of(user).shape[-1] == width:
            found += _sum_over_rows(user)
        elif user.target is aten.sum.dim_IntList and value_of(user).numel() == width and not user.kwargs:
            last = value_of(node).ndim - 1
            found += [user] if all(d not in (last, -1) for d in user.args[1]) else []
    return found


def _sums_of_products(a: fx.Node, b: fx.Node) -> Iterator[fx.Node]:
    """Sums over tokens of the product of ``a`` and ``b`` that nothing else reads."""
    for user in sorted(a.users):
        if user.target is aten.mul.Tensor and set(user.args) == {a, b} and len(user.users) == 1:
            total = _sum_over_tokens(user)
            if total is not None:
                yield total


def _with_stream(dx: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(the sum that is the only reader of ``dx``, what it adds); or ``dx`` itself."""
    user = only_user(dx)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return dx, None
    other = other_input(user, dx)
    if other is None or value_of(other).shape != value_of(dx).shape:
        return dx, None
    return user, other


def _gates(total: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node, fx.Node]]:
    """(the gradient of a gated branch, its gate, the branch, the gate's gradient), where ``total`` is the gradient of
    the branch times the gate."""
    shape = value_of(total).shape
    for user in sorted(total.users):
        if user.target is not aten.mul.Tensor:
            continue
        full, gate = _by_size(user, shape)
        if full is not total or gate is None or value_of(gate).shape != (shape[0], 1, shape[2]):
            continue
        for forward in sorted(gate.users):
            if forward.target is aten.mul.Tensor and forward < total:
                branch, _ = _by_size(forward, shape)
                for dgate in _sums_of_products(total, branch) if branch is not None else ():
                    yield user, gate, branch, dgate


def _unsupported(found: _Modulated, aliases: Aliases) -> str | None:
    """Why the operator cannot take the place of these nodes, or None."""
    full = [node for node in (found.dy, found.x, found.dh, found.branch) if node is not None]
    dtypes = {value_of(node).dtype for node in (*full, *found.results)}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        return f"its tensors are of {' and '.join(sorted(map(str, dtypes)))}"
    if value_of(found.x).shape[-1] > WIDEST:
        return f"rows of {value_of(found.x).shape[-1]} channels are too wide"
    if any(value_of(node).stride() != value_of(found.x).stride() for node in (*full, *found.results[:1])):
        return "its tensors do not lie in memory alike"
    last = max(found.reads)
    early = [user for node in found.results for user in node.users if user <= last and user not in found.results]
    if early:
        return f"{early[0].name} reads a result before {last.name} is known"
    end = max(aliases.position[node] for node in found.results)
    written = [n for n in found.reads if n in aliases.position and aliases.written_between(n, aliases.position[n], end)]
    return f"{written[0].name} is overwritten before its backward is done" if written else None


def _rewrite(found: _Modulated) -> None:
    build = Builder(*found.results, after=max(found.reads))
    target, more = ours.modulated_norm_backward.default, ()
    if found.gate is not None:
        target, more = ours.gated_norm_backward.default, (found.branch, found.gate)
    node = build(target, found.dy, found.x, found.mean, found.rstd, found.scale, found.offset, found.dh, *more)
    for i, old in enumerate(found.results):
        new = build(operator.getitem, node, i, like=old)
        old.replace_all_uses_with(build.view(new, value_of(old).shape, like=old))
    erase_unread(*found.results)

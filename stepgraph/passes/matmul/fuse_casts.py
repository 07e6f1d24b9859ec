"""Casts to fp8 in the kernel that makes what they read.

Matches: casts of `fp8_matmul`, by rows alone or with one scale, of what a norm of our kernels or a SwiGLU gives. Before
-> after:
    y = norm(x); cast_scaled_rows(y)          ->  ``stepgraph::norm_cast``: y, its cast and the scales
    y = norm(x); cast_scaled(y, amax(y))      ->  ``stepgraph::norm_cast``: y and its rows' magnitudes, cast_scaled(y,
                                                  amax(magnitudes))
    y = silu(gate) * up; cast_scaled_rows(y)  ->  ``stepgraph::swiglu_cast_rows(gate, up)``
    the same, by columns too, or one scale    ->  ``stepgraph::swiglu_magnitudes``: y and the magnitudes of its rows and
                                                  columns, then cast_by_magnitudes(y, ...) or cast_scaled(y, amax(rows))
    both gradients of a SwiGLU and their casts, as above  ->  ``stepgraph::swiglu_backward_cast_rows`` or
                                                              ``stepgraph::swiglu_backward_magnitudes``
A row is complete in one program, so its magnitude, and with that its cast, reads nothing again; a column and a whole
matrix are not, and the cast reads what was made once more, but not twice. The bits are those of the operators apart;
what Inductor made of a SwiGLU rounded less often. In bf16 y stays for whatever reads it, as weight gradients do;
SwiGLU's, and its gradients, are not written where none does.
Stay apart: scales by columns of other matrices; one scale of what else Inductor makes, which may find it on the way.
Tier numerics, as `fp8_matmul`, without which it has nothing to do. Comes after what makes copies and norms' kernels.
"""

import operator
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.capture.roles import MIXED, made_from
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.facts import getitem_users, is_pointwise, is_view, packet
from stepgraph.graph.provenance import phase_of
from stepgraph.graph.values import Parameter
from stepgraph.kernels.fp8 import swiglu  # noqa: F401  (these define operators of torch.ops.stepgraph)
from stepgraph.kernels.norm import cast as norm_cast  # noqa: F401
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph

_INF = float("inf")
_CASTS = (ours.cast_scaled.default, ours.cast_scaled_rows.default)


class _SwiGLU(NamedTuple):
    """``product`` = silu(gate) * up."""

    product: fx.Node
    silu: fx.Node
    gate: fx.Node
    up: fx.Node


class _Gradients(NamedTuple):
    """``dup`` = dy * silu(gate), ``dgate`` = silu'(gate) * (dy * up); ``casts``: of dgate and dup."""

    dgate: fx.Node
    dup: fx.Node
    casts: tuple[fx.Node, fx.Node]
    inputs: tuple[fx.Node, fx.Node, fx.Node]  # dy, gate, up


@register(
    "fuse_casts",
    "numerics",
    after=("fp8_matmul", "recompute", "fuse_norm"),
    from_options=lambda options: None if options.fp8 == "off" else {},
)
def fuse_casts(step: StepGraph, options: object, report: PassReport) -> None:
    """Cast to fp8 in the kernel that makes what is cast."""
    casts = [node for node in step.graph.nodes if node.target in _CASTS]
    report.matched = len(casts)
    if not casts:
        return
    aliases, made = Aliases(step.graph), made_from(step.graph, set(step.placeholders(Parameter)))
    alone: dict[str, list[fx.Node]] = defaultdict(list)
    norms = swiglus = gradients = 0
    for both in _gradients(casts, aliases):
        _cast_with_gradients(both)
        casts = [cast for cast in casts if cast not in both.casts]
        gradients += 2
    for cast in casts:
        if norm := _norm_before(cast, aliases):
            _cast_with_norm(cast, norm)
            norms += 1
        elif found := _swiglu_before(cast, aliases):
            _cast_with_swiglu(cast, found)
            swiglus += 1
        else:
            alone[_kind(cast, made[cast.args[0]])].append(cast)
    report.changed = norms + swiglus + gradients
    report.summary = (
        f"{report.changed} of {report.matched} casts to fp8 fed by the kernel before: {norms} of norms, {swiglus} of "
        f"SwiGLU, {gradients} of its gradients"
    )
    for kind, some in alone.items():
        elements = sum(cast.args[0].meta["val"].numel() for cast in some)
        report.notes.append(f"casts that stand alone, {kind}: {len(some)}, of {elements / 2**20:.1f} Mi elements")
    if on_the_way := sum(_is_of_elements(cast) for some in alone.values() for cast in some):
        report.notes.append(
            f"{on_the_way} of these with one scale, of what Inductor makes: it finds the largest magnitude on the way, "
            "and a kernel of ours would save nothing"
        )


def _is_of_elements(cast: fx.Node) -> bool:
    """Whether ``cast`` has one scale, and reads what is computed element by element."""
    source = _made(cast.args[0])[-1]
    computed = is_pointwise(source) or source.target is aten.silu_backward.default
    return cast.target is ours.cast_scaled.default and computed


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


def _norm_before(cast: fx.Node, aliases: Aliases) -> fx.Node | None:
    """The norm whose kernel can give ``cast`` its scales."""
    y = _made(cast.args[0])[-1]
    if y.target is not operator.getitem or y.args[1] != 0 or y.args[0].target is not ours.norm.default:
        return None
    norm = y.args[0]
    form = _form(cast)
    known = form == "whole" or (form == "rows" and cast.args[1] == torch.float8_e4m3fn)
    written = aliases.written_between(y, aliases.position[norm], aliases.position[cast])
    return norm if known and not written and phase_of(norm) == phase_of(cast) else None


def _cast_with_norm(cast: fx.Node, norm: fx.Node) -> None:
    """A norm with its cast, or with the magnitudes that the cast's scale is made of, in the place of the norm."""
    whole = _form(cast) == "whole"
    new = Builder(norm, cast, before=norm)(ours.norm_cast.default, *norm.args, not whole)
    norm.replace_all_uses_with(new)  # y, h, mean and rstd have the same places
    norm.graph.erase_node(norm)
    if whole:
        _put_magnitudes(cast, new, 5)
        return
    build, (rows, columns) = Builder(cast, before=cast), cast.args[0].meta["val"].shape
    values, scale = build.parts(new, 4, 5)
    _put(cast, build.view(values, torch.Size((rows, columns))), build.view(scale, torch.Size((rows,))))


def _amax_before(cast: fx.Node) -> fx.Node | None:
    """The largest magnitude of what ``cast`` reads, which its one scale is made of."""
    amax = cast.args[1]
    return amax if amax.target is aten.linalg_vector_norm.default and amax.args[:2] == (cast.args[0], _INF) else None


def _form(cast: fx.Node) -> str | None:
    """How a SwiGLU's kernel serves ``cast``: it makes it, it gives the magnitudes of rows and columns, or those which
    one scale is made of. None: not at all."""
    if cast.target is ours.cast_scaled_rows.default:
        return {(True, False): "rows", (True, True): "both"}.get(cast.args[2:])
    return "whole" if _amax_before(cast) else None


def _swiglu_before(cast: fx.Node, aliases: Aliases) -> _SwiGLU | None:
    """The SwiGLU whose kernel can serve ``cast``."""
    if _form(cast) is None:
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


def _cast_with_swiglu(cast: fx.Node, found: _SwiGLU) -> None:
    """One operator in the place of the product and of its cast."""
    product = found.product
    if (form := _form(cast)) != "rows":
        build = Builder(product, found.silu, before=product)
        made = build(ours.swiglu_magnitudes.default, found.gate, found.up, form == "both")
        product.replace_all_uses_with(build(operator.getitem, made, 0, like=product))
        erase_unread(product)
        _put_magnitudes(cast, made, 1)
        return
    keep = _is_read(cast)
    build = Builder(product, found.silu, cast, before=product)
    made = build(ours.swiglu_cast_rows.default, found.gate, found.up, cast.args[1], keep)
    values, scale = (build(operator.getitem, made, i, like=cast) for i in (1, 2))
    if keep:
        product.replace_all_uses_with(build(operator.getitem, made, 0, like=product))
        erase_unread(product)
    _put(cast, values, scale)


def _gradients(casts: list[fx.Node], aliases: Aliases) -> Iterator[_Gradients]:
    """Where a kernel can make both gradients of a SwiGLU and their casts."""
    cast_of = {_made(cast.args[0])[-1]: cast for cast in casts if _form(cast) is not None}
    for dgate, cast in cast_of.items():
        if dgate.target is not aten.silu_backward.default or dgate.args[0].target is not aten.mul.Tensor:
            continue
        dsilu, gate = dgate.args
        for dy, up in (dsilu.args, dsilu.args[::-1]):
            dup, silu = _times_silu(dy, gate, cast_of)
            if dup is None or not isinstance(up, fx.Node):
                continue
            found = _Gradients(dgate, dup, (cast, cast_of[dup]), (dy, gate, up))
            if _form(cast) == _form(cast_of[dup]) and _is_one_kernel(found, (silu, dsilu), aliases):
                yield found
                break


def _times_silu(dy: object, gate: fx.Node, among: Container[fx.Node]) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """(the one ``among`` the readers of ``dy`` that is dy * silu(gate), that silu), or None twice."""
    for reader in dy.users if isinstance(dy, fx.Node) else ():
        if reader in among and reader.target is aten.mul.Tensor:
            for silu in reader.args:
                if silu is not dy and getattr(silu, "target", None) is aten.silu.default and silu.args == (gate,):
                    return reader, silu
    return None, None


def _is_one_kernel(found: _Gradients, between: tuple[fx.Node, fx.Node], aliases: Aliases) -> bool:
    """Whether the operator of both gradients can stand where the first is made. ``between``: silu(gate), dy * up."""
    gradients, values = (found.dgate, found.dup), [node.meta["val"] for node in (*found.inputs, found.dgate, found.dup)]
    alike = all((v.shape, v.dtype) == (values[0].shape, values[0].dtype) for v in values)
    position = aliases.position
    ready = max(position[node] for node in found.inputs) < min(position[node] for node in gradients)
    first, last = min(position[node] for node in between), max(position[cast] for cast in found.casts)
    reads = (*found.inputs, *between, *gradients)
    unwritten = not any(aliases.written_between(node, first, last) for node in reads)
    return alike and ready and unwritten and all(node.meta["val"].is_contiguous() for node in gradients)


def _cast_with_gradients(found: _Gradients) -> None:
    """One operator in the place of both gradients and their casts."""
    gradients, (cast, _) = (found.dgate, found.dup), found.casts
    if (form := _form(cast)) != "rows":
        build = Builder(*gradients, before=min(gradients))
        made = build(ours.swiglu_backward_magnitudes.default, *found.inputs, form == "both")
        for i, (gradient, own) in enumerate(zip(gradients, found.casts, strict=True)):
            gradient.replace_all_uses_with(build(operator.getitem, made, i, like=gradient))
            erase_unread(gradient)
            _put_magnitudes(own, made, 2 + 2 * i)
        return
    keep = any(map(_is_read, found.casts))
    build = Builder(*gradients, *found.casts, before=min(gradients))
    made = build(ours.swiglu_backward_cast_rows.default, *found.inputs, cast.args[1], keep)
    for i, (gradient, own) in enumerate(zip(gradients, found.casts, strict=True)):
        values, scale = (build(operator.getitem, made, 2 + 2 * i + j, like=own) for j in (0, 1))
        if keep:
            gradient.replace_all_uses_with(build(operator.getitem, made, i, like=gradient))
            erase_unread(gradient)
        _put(own, values, scale)


def _is_read(cast: fx.Node) -> bool:
    """Whether anything else reads what ``cast`` reads, or what that is a view of."""
    chain = _made(cast.args[0])
    return any(set(node.users) != {reader} for node, reader in zip(chain, (cast, *chain), strict=False))


def _put_magnitudes(cast: fx.Node, made: fx.Node, at: int) -> None:
    """Magnitudes of rows, then of columns, result ``at`` of ``made``, for what ``cast`` would look for."""
    if _form(cast) == "whole":
        amax = cast.args[1]
        amax.update_arg(0, Builder(amax, before=amax)(operator.getitem, made, at))
        return
    build = Builder(cast, before=cast)
    known = build.parts(made, at, at + 1)
    cast.replace_all_uses_with(build(ours.cast_by_magnitudes.default, cast.args[0], *known, cast.args[1]))
    cast.graph.erase_node(cast)


def _put(cast: fx.Node, values: fx.Node, scale: fx.Node) -> None:
    """Replace a cast by rows, and what only it read, by ``values`` and ``scale``."""
    for i, old in getitem_users(cast).items():
        old.replace_all_uses_with((values, scale)[i])
        old.graph.erase_node(old)
    erase_unread(cast)

"""Products of expert rows in fp8, forward and backward, with a scale for each row of both sides.

Matches: grouped products in bf16. Before -> after, where W^T is a matrix of each expert:

    grouped_mm(rows, W, offsets)         -> grouped_scaled_mm of packed rows and of W^T cast by its rows
    grouped_mm_weight(x, dy, offsets)    -> grouped_scaled_mm_weight of casts by expert, transposed, of x and dy
    cast_packed_rows(swiglu_rows(..))    -> swiglu_rows_cast(..), which leaves the rows themselves where nothing else
                                            reads them; its backward likewise

A weight's gradient sums over what the other products multiplied: it reads packed rows where there are any, and nothing
keeps the rows in bf16. All sides are e4m3. Every recipe of fp8 has scales by rows here: torch multiplies groups in no
other way. The recipe ``rowwise-bf16-weight-gradients`` leaves gradients of weights in bf16.
Tier numerics: values are rounded to 3 bits. Preconditions: bf16, matrices of which 16 divides both sides. Products
whose casts take longer than they save stay in bf16, and those of modules that ``fp8_skip`` names.
Source: as `fp8_matmul`; groups as torchao's ``_scaled_grouped_mm`` has them.
"""

import operator
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import fx

from stepgraph.costs.fp8 import cast_seconds, product_seconds, recast_seconds
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import is_cast, leaves_rest, swapped
from stepgraph.graph.provenance import phase_of, provenance
from stepgraph.kernels.fp8.formats import MULTIPLE
from stepgraph.kernels.moe.packed import E4M3
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCT, _WEIGHT_PRODUCT = ours.grouped_mm.default, ours.grouped_mm_weight.default
#: What makes rows of experts -> what makes packed ones too.
_WITH_CAST = {
    ours.swiglu_rows.default: ours.swiglu_rows_cast.default,
    ours.swiglu_rows_backward.default: ours.swiglu_rows_cast_backward.default,
}

#: The compute capability of GPUs that torch's products of groups in fp8 are for.
_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class ExpertFp8Options:
    """``weight_gradients``: whether these are in fp8 too. ``skip``: patterns of module paths that stay in bf16.
    ``unprofitable``: also where the forecast finds nothing to gain. ``capability``: the GPU's, None where there is none
    or it is unknown; by the target."""

    weight_gradients: bool = True
    skip: tuple[str, ...] = ()
    unprofitable: bool = False
    capability: tuple[int, int] | None = None


@register(
    "fp8_experts",
    "numerics",
    options=ExpertFp8Options(),
    after=("expert_swiglu", "unread_rows"),
    from_options=lambda options: (
        {"weight_gradients": options.fp8 != "rowwise-bf16-weight-gradients", "skip": options.fp8_skip}
        if options.fp8_experts
        else None
    ),
    for_target=lambda options, target: replace(options, capability=target.capability),
)
def fp8_experts(step: StepGraph, options: ExpertFp8Options, report: PassReport) -> None:
    """Multiply the rows of experts in fp8, forward and backward."""
    stays: Counter[str] = Counter()
    packed: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple, tuple[fx.Node, ...]] = {}
    aliases = Aliases(step.graph)
    for node in step.calling(_PRODUCT, _WEIGHT_PRODUCT):
        report.matched += 1
        if why := _refusal(node, options, packed):
            stays[why] += 1
            continue
        build = Builder(node, before=node)
        if node.target is _PRODUCT:
            rows, weight, offsets = node.args[:3]
            if rows not in packed:
                packed[rows] = Builder(node, before=min(rows.users))(ours.cast_packed_rows.default, rows)
            w, weight_scale = _cast_weight(weight, build, casts, aliases)
            rest = {"zero_rest": False} if leaves_rest(node) else {}
            new = build(ours.grouped_scaled_mm.default, packed[rows], w, weight_scale, offsets, **rest)
        else:
            sides = (_cast_groups(packed.get(n, n), node.args[2], build, casts) for n in node.args[:2])
            (a, scale_a, ends), (b, scale_b, _) = sides
            new = build(ours.grouped_scaled_mm_weight.default, a, b, scale_a, scale_b, ends)
        replace_node(node, new, sweep=True)
        report.changed += 1
    fused = sum(_cast_where_made(rows, cast) for rows, cast in packed.items())
    report.summary = f"{report.changed} of {report.matched} products of expert rows in fp8"
    if fused:
        report.summary += f"; {fused} of {len(packed)} casts fused into the SwiGLU that makes the rows"
    report.notes += [f"{count} stay in bf16: {why}" for why, count in stays.items()]


def _refusal(node: fx.Node, options: ExpertFp8Options, packed: dict[fx.Node, fx.Node]) -> str | None:
    """Why the product is left unchanged, or None."""
    a, b, result = (n.meta["val"] for n in (*node.args[:2], node))
    weight = result if node.target is _WEIGHT_PRODUCT else b
    (_, K, N), R = weight.shape, a.shape[0]
    for pattern in options.skip:
        if fnmatchcase(provenance(node).path, pattern):
            return f"fp8_skip={pattern}"
    if a.dtype != torch.bfloat16:
        return f"{str(a.dtype).removeprefix('torch.')}, and fp8 replaces only bf16"
    if options.capability not in (None, _CAPABILITY):
        return "torch multiplies groups in fp8 only on compute capability {}.{}".format(*_CAPABILITY)
    if K % MULTIPLE or N % MULTIPLE:
        return f"{K} x {N} is not a multiple of {MULTIPLE} in both dimensions"
    if node.target is _WEIGHT_PRODUCT and not options.weight_gradients:
        return "gradients of weights, by the recipe"
    if options.unprofitable:
        return None
    bf16, fp8 = (product_seconds((R, N, K), fp8=eight) for eight in (False, True))
    if node.target is _PRODUCT:
        transposed = not b.mT.is_contiguous()
        taken = cast_seconds(a.numel(), 1, reads=1) + cast_seconds(b.numel(), 1 + 2 * transposed, reads=1 + transposed)
    else:
        taken = sum(
            recast_seconds(n.meta["val"].numel()) if n in packed else cast_seconds(n.meta["val"].numel(), 1, reads=2)
            for n in node.args[:2]
        )
    if fp8 + taken < bf16:
        return None
    return (
        f"{R} rows of {K} x {N} save nothing: {1e6 * bf16:.1f} us in bf16, {1e6 * fp8:.1f} us in fp8 with "
        f"{1e6 * taken:.1f} us of casts"
    )


def _cast_where_made(rows: fx.Node, cast: fx.Node) -> bool:
    """Let a SwiGLU make ``cast``, and ``rows`` where anything else reads them. Whether it can."""
    if rows.target not in _WITH_CAST or not leaves_rest(rows):
        return False
    keep, build = len(rows.users) > 1, Builder(rows, cast, before=rows)
    made = build(_WITH_CAST[rows.target], *rows.args, keep)
    replace_node(cast, build(operator.getitem, made, 1, like=cast))
    if keep:
        rows.replace_all_uses_with(build(operator.getitem, made, 0, like=rows))
    rows.graph.erase_node(rows)
    return True


def _cast_weight(weight: fx.Node, build: Builder, casts: dict, aliases: Aliases) -> tuple[fx.Node, ...]:
    """Values (E, N, K) and scales (E, N) of the transposes of ``weight`` (E, K, N). Of a weight that is rounded from
    fp32, the rows are cast without the rounding, which takes one kernel instead of two; transposed, it is rounded again
    where it is cast, and not kept."""
    straight = swapped(weight)
    key = ("weight", straight or weight, straight is not None, phase_of(build.place))
    if key not in casts:
        bf16 = straight or weight
        source = bf16.args[0] if is_cast(bf16) and bf16.args[0].meta["val"].dtype == torch.float32 else None
        if source and aliases.written_between(source, aliases.position[bf16], aliases.position[build.place]):
            source = None
        if straight:
            x = source or straight
        else:
            x = build(aten.transpose.int, weight if source is None else build.cast(source, torch.bfloat16), 1, 2)
        x = build.contiguous(x)
        E, N, K = x.meta["val"].shape
        made = build(ours.cast_scaled_rows.default, build.view(x, (E * N, K)), E4M3, True, False)
        q, scale = build.parts(made, 0, 1)
        casts[key] = build.view(q, (E, N, K)), build.view(scale, (E, N))
    return casts[key]


def _cast_groups(x: fx.Node, offsets: fx.Node, build: Builder, casts: dict) -> tuple[fx.Node, ...]:
    """Values and scales of rows by their columns, transposed, for each expert apart, and where these parts end."""
    key = (x, offsets)
    if key not in casts:
        made = build(ours.cast_scaled_groups.default, x, offsets, E4M3)
        casts[key] = tuple(build.parts(made, 0, 1, 2))
    return casts[key]

"""Products of linear layers in fp8, forward and backward, each cast shared by all products that read it.

Matches: linear layers with bf16 products (see `layers`): forward, input gradient, weight gradient. Before -> after:
    mm(x, w^T), mm(dy, w), mm(dy^T, x) -> one cast of each of x, w and dy, and three ``stepgraph::scaled_product``
A product reads both sides along the dimension that it sums over. A matrix that is also summed over its rows (x and dy
for the weight gradient, w for the input gradient) is cast into a transposed copy as well, by the same operator.

    recipe                          scales                        x and w   dy     weight gradient
    tensorwise                      one for each matrix           e4m3      e5m2   fp8
    rowwise                         for each row of both sides    e4m3      e4m3   fp8
    rowwise-bf16-weight-gradients   as rowwise                    e4m3      e4m3   bf16

Scales are those of the step's own values. On a GPU forward's sums (by rows: all sums) stay in the tensor cores' shorter
accumulators, and the others go over to fp32 in between, as torchao's recipes of these names have it.
Tier numerics: values are rounded to 3 bits (e5m2: 2). Preconditions: bf16 products, M, N and K that 16 divides. Stay as
they are: what the loss reads (the head), routers, and layers whose casts take longer than their products save.
Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; the recipes: torchao's float8 training.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

import torch
from torch import fx

from stepgraph.costs.fp8 import cast_seconds, product_seconds
from stepgraph.errors import unknown_name
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.facts import swapped
from stepgraph.graph.provenance import phase_of
from stepgraph.passes.contract import PassReport, StepGraph, register
from stepgraph.passes.matmul.layers import Layer, Product, Side, find, is_head, is_router

aten, ours = torch.ops.aten, torch.ops.stepgraph

Recipe = Literal["tensorwise", "rowwise", "rowwise-bf16-weight-gradients"]
#: What a matrix is in the model. It decides its format.
Kind = Literal["activation", "weight", "output gradient"]


class Planned(NamedTuple):
    """A product that is to be in fp8. ``which``: ``forward``, ``input gradient`` or ``weight gradient``. ``kinds``: of
    its two sides."""

    product: Product
    which: str
    kinds: tuple[Kind, Kind]

    def sides(self) -> list[tuple[tuple, Kind, Side, bool]]:
        """Of both sides: what identifies the cast, the kind, the side, and whether the transposed copy is read."""
        a, b = self.product.a, self.product.b
        # y = a b is the sum over the rows' elements of a, and over those of b's transpose.
        both = ((a, a.across), (b, not b.across))
        return [((kind, s.matrix), kind, s, columns) for (s, columns), kind in zip(both, self.kinds, strict=True)]


@dataclass
class Cast:
    """A cast to be made. ``side``: the first that reads it. ``rows``, ``columns``: which copies are read, the second
    transposed. ``products``: that read it, in the order of the graph."""

    kind: Kind
    side: Side
    products: list[fx.Node]
    rows: bool = False
    columns: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the matrix."""
        return math.prod(self.side.node.meta["val"].shape)

    def seconds(self, recipe: Recipe) -> float:
        """By the roofline: a scale must be known before a value is cast. A row by itself is read once."""
        reads = 1 if recipe != "tensorwise" and not self.columns else 2
        return cast_seconds(self.elements, self.rows + self.columns, reads=reads)


def products_of(layer: Layer, recipe: Recipe) -> list[Planned]:
    """The products of ``layer`` that ``recipe`` has in fp8."""
    planned = [Planned(layer.forward, "forward", ("activation", "weight"))]
    if layer.input_gradient is not None:
        planned.append(Planned(layer.input_gradient, "input gradient", ("output gradient", "weight")))
    if layer.weight_gradient is not None and recipe != "rowwise-bf16-weight-gradients":
        kinds = ("output gradient", "activation")
        straight = layer.weight_gradient.b.matrix == layer.x
        planned.append(Planned(layer.weight_gradient, "weight gradient", kinds if straight else kinds[::-1]))
    return planned


def plan(products: Iterable[Planned]) -> dict[tuple, Cast]:
    """The casts that ``products`` share, by key; both in graph order."""
    casts: dict[tuple, Cast] = {}
    for planned in products:
        for key, kind, side, columns in planned.sides():
            cast = casts.setdefault(key, Cast(kind, side, []))
            cast.rows, cast.columns = cast.rows or not columns, cast.columns or columns
            cast.products.append(planned.product.node)
    return casts


def profitable(layers: list[Layer], recipe: Recipe) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """(the layers whose products save more than their shares of the casts take, why the others do not).

    When a layer is left out, others pay for its shared casts, so the rest is evaluated again.
    """
    left: dict[str, list[Layer]] = {}
    while True:
        products = {id(layer): products_of(layer, recipe) for layer in layers}
        casts = plan(p for some in products.values() for p in some)
        stays = []
        for layer in layers:
            bf16, fp8, shares = _seconds(products[id(layer)], casts, recipe)
            if fp8 + shares < bf16:
                stays.append(layer)
                continue
            sizes = " x ".join(map(str, layer.forward.sizes))
            why = (
                f"{sizes} saves nothing: {len(products[id(layer)])} products in {1e6 * bf16:.1f} us in bf16, in "
                f"{1e6 * fp8:.1f} us in fp8 with {1e6 * shares:.1f} us of casts"
            )
            left.setdefault(why, []).append(layer)
        if len(stays) == len(layers):
            return layers, left
        layers = stays


def _seconds(products: list[Planned], casts: dict[tuple, Cast], recipe: Recipe) -> tuple[float, float, float]:
    """Seconds of the products in bf16 and in fp8, and their shares of the casts."""
    shares = 0.0
    for planned in products:
        for key, *_ in planned.sides():
            shares += casts[key].seconds(recipe) / len(casts[key].products)
    bf16, fp8 = (sum(product_seconds(p.product.sizes, fp8=eight) for p in products) for eight in (False, True))
    return bf16, fp8, shares


#: Sizes of products are multiples of it: 16 bytes of a row.
_MULTIPLE = 16
#: Modules that a note names.
_NAMES = 4


@dataclass(frozen=True)
class Fp8MatmulOptions:
    """``recipe``: see above. ``skip``: patterns of module paths that are left unchanged, as in ``layers.0.*``.
    ``unprofitable``: also where the forecast finds nothing to gain."""

    recipe: Recipe = "tensorwise"
    skip: tuple[str, ...] = ()
    unprofitable: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in get_args(Recipe):
            raise unknown_name("fp8 recipe", self.recipe, get_args(Recipe))


@register(
    "fp8_matmul",
    "numerics",
    options=Fp8MatmulOptions(),
    from_options=lambda options: None if options.fp8 == "off" else {"recipe": options.fp8, "skip": options.fp8_skip},
)
def fp8_matmul(step: StepGraph, options: Fp8MatmulOptions, report: PassReport) -> None:
    """Multiply in fp8 in linear layers, forward and backward."""
    found = find(step, Aliases(step.graph))
    stays: dict[str, list[Layer]] = defaultdict(list)
    layers = []
    for layer in found.layers:
        why = _refusal(layer, options)
        (stays[why] if why else layers).append(layer)
    if not options.unprofitable:
        layers, dear = profitable(layers, options.recipe)
        stays |= dear
    products = sorted((p for layer in layers for p in products_of(layer, options.recipe)), key=lambda p: p.product.node)
    casts = plan(products)
    rewrite(products, casts, options.recipe)
    report.matched, report.changed = len(found.layers), len(layers)
    counts = Counter(p.which for p in products)
    report.summary = (
        f"{options.recipe}: {len(layers)} of {len(found.layers)} linear layers in fp8; {counts['forward']} products of "
        f"forward, {counts['input gradient']} input gradients, {counts['weight gradient']} weight gradients"
    )
    report.notes += _cast_notes(casts.values())
    report.notes += _left_notes(stays)
    for nodes, what in (
        (found.batched, "products of forward that multiply by parameters in batches or groups"),
        (found.other, "products of backward of no linear layer"),
    ):
        if nodes:
            names = ", ".join(node.name for node in nodes[:_NAMES])
            report.notes.append(f"left in bf16: {len(nodes)} {what} ({names})")
    if idle := [
        pattern for pattern in options.skip if not any(fnmatchcase(layer.path, pattern) for layer in found.layers)
    ]:
        report.notes.append(f"fp8_skip matches no linear layer: {', '.join(idle)}")


def _refusal(layer: Layer, options: Fp8MatmulOptions) -> str | None:
    """Why the layer is left unchanged whatever it costs, or None."""
    for pattern in options.skip:
        if fnmatchcase(layer.path, pattern):
            return f"fp8_skip={pattern}"
    dtypes = {n.meta["val"].dtype for p in layer.products for n in (p.node, p.a.node, p.b.node)} - {torch.bfloat16}
    if dtypes:
        return f"{str(dtypes.pop()).removeprefix('torch.')}, and fp8 replaces only bf16"
    if layer.forward.why_not:
        return layer.forward.why_not
    if is_head(layer):
        return "the loss reads it"
    if is_router(layer):
        return "it chooses experts"
    if any(size % _MULTIPLE for size in layer.forward.sizes):
        return f"{' x '.join(map(str, layer.forward.sizes))} is not a multiple of {_MULTIPLE} in both dimensions"
    return None


def _cast_notes(casts: Iterable[Cast]) -> list[str]:
    """A line for each kind of cast."""
    kinds: dict[str, list[Cast]] = defaultdict(list)
    for cast in casts:
        copies = {(True, False): "by rows", (False, True): "transposed", (True, True): "by rows and transposed"}
        kinds[f"{cast.kind}s {copies[cast.rows, cast.columns]}"].append(cast)
    return [
        f"casts of {kind}: {len(some)}, of {sum(c.elements for c in some) / 2**20:.1f} Mi elements, for "
        f"{sum(len(c.products) for c in some)} products"
        for kind, some in kinds.items()
    ]


def _left_notes(stays: Mapping[str, list[Layer]]) -> list[str]:
    """A line for each reason."""
    notes = []
    for why, layers in stays.items():
        paths = list(dict.fromkeys(layer.path or "model" for layer in layers))
        more = f" and {len(paths) - _NAMES} more" if len(paths) > _NAMES else ""
        dtype = "" if why.startswith("float") else "bf16, "
        notes.append(f"left in {dtype}{why}: {', '.join(paths[:_NAMES])}{more}")
    return notes


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def format_of(kind: Kind, recipe: Recipe) -> torch.dtype:
    """The format of a matrix. One scale for a whole output gradient must leave room for its range; one for each row
    need not."""
    return E5M2 if kind == "output gradient" and recipe == "tensorwise" else E4M3


def rewrite(products: list[Planned], casts: dict[tuple, Cast], recipe: Recipe) -> None:
    """Replace ``products``, in the order of the graph, by fp8 products of ``casts``."""
    made = {key: _cast(cast, recipe) for key, cast in casts.items()}
    for planned in products:
        node = planned.product.node
        (a, scale_a), (b, scale_b) = (made[key][columns] for key, _, _, columns in planned.sides())
        fast = recipe != "tensorwise" or planned.which == "forward"
        build = Builder(node, before=node)
        new = build(ours.scaled_product.default, a, b, scale_a, scale_b, planned.product.bias, fast)
        replace(node, new, sweep=True)


def _cast(cast: Cast, recipe: Recipe) -> dict[bool, tuple[fx.Node, fx.Node]]:
    """(the copy, its scale) in rows, and for True transposed; in the name of the products of the first one's phase."""
    first = cast.products[0]
    build = Builder(*(p for p in cast.products if phase_of(p) == phase_of(first)), before=first)
    dtype, copies = format_of(cast.kind, recipe), (cast.rows, cast.columns)
    x = _in_rows(cast, build)
    if recipe == "tensorwise":
        amax = build(aten.linalg_vector_norm.default, x, float("inf"), None, False, dtype=torch.float32)
        result = build(ours.cast_scaled.default, x, amax, dtype, *copies)
        scale = build(operator.getitem, result, 0)
        return {side: (build(operator.getitem, result, 1 + side), scale) for side in (False, True) if copies[side]}
    result = build(ours.cast_scaled_rows.default, x, dtype, *copies)
    return {side: tuple(build.parts(result, 2 * side, 2 * side + 1)) for side in (False, True) if copies[side]}


def _in_rows(cast: Cast, build: Builder) -> fx.Node:
    """The matrix in its rows."""
    node = cast.side.node
    return swapped(node) or build(aten.t.default, node) if cast.side.across else node

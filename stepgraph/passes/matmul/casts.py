"""The casts that fp8 products need: one per matrix, for all products that read it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import fx

from stepgraph.costs.fp8 import cast_seconds, product_seconds
from stepgraph.passes.matmul.layers import Layer, Product, Side

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
    """The casts that ``products`` share, by what identifies them; both in the order of the graph."""
    casts: dict[tuple, Cast] = {}
    for planned in products:
        for key, kind, side, columns in planned.sides():
            cast = casts.setdefault(key, Cast(kind, side, []))
            cast.rows, cast.columns = cast.rows or not columns, cast.columns or columns
            cast.products.append(planned.product.node)
    return casts


def profitable(layers: list[Layer], recipe: Recipe) -> tuple[list[Layer], dict[str, list[Layer]]]:
    """(the layers whose products save more than their shares of the casts take, why the others do not).

    Where a layer is left out, others pay for the casts that it shared: what remains is looked at again.
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

"""What `product_epilogues` looks for: a product and what follows it, which one kernel can compute."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.edit import Builder
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import RESHAPES, argument

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass
class Pair:
    """``product``, and ``last``, the last node that the kernel replaces."""

    product: fx.Node
    last: fx.Node

    @property
    def what(self) -> str:
        """What follows the product, in words."""
        raise NotImplementedError

    @property
    def matrices(self) -> tuple[fx.Node, fx.Node]:
        return self.product.args[-2:]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(M, K, N)."""
        a, b = (node.meta["val"] for node in self.matrices)
        return *a.shape, b.shape[1]

    def rewrite(self) -> None:
        """Put the kernel in its place."""
        raise NotImplementedError


def feeds_products(node: fx.Node, besides: Collection[fx.Node] = ()) -> bool:
    """Whether all readers of ``node`` are products or ``besides``, also through views."""
    return all(
        feeds_products(user, besides)
        if user.target in (*RESHAPES, aten.t.default)
        else user.target in PRODUCTS or user in besides
        for user in node.users
    )


def sums_of_rows(node: fx.Node, shape: torch.Size) -> Iterator[fx.Node]:
    """Sums of the rows of ``node`` as a matrix of ``shape``."""
    for user in node.users:
        if user.target in RESHAPES:
            yield from sums_of_rows(user, shape)
        elif (
            user.target is aten.sum.dim_IntList
            and node.meta["val"].shape == shape
            and list(user.args[1]) in ([0], [-2])
            and argument(user, "dtype") is None
        ):
            yield user


def replace_sums(sums: Iterable[fx.Node], total: fx.Node) -> None:
    """``total`` takes the place of ``sums``, as `sums_of_rows` gives them."""
    for one in sums:
        build, value = Builder(one, before=one), one.meta["val"]
        replace_node(one, build.cast(build.view(total, value.shape), value.dtype), sweep=True)

"""The products that orthogonalize Muon's updates: those of equal form together, and half of each symmetric one.

Matches, in the optimizer phase, iterations over X (M, N) in 16 bits, as torch.optim.Muon and Keller Jordan's have them:

    A = X X^T;  B = b A + c A A;  X' = a X + B X

Before -> after: iterations of several matrices of one form -> one over all of them, stacked, where one alone leaves
processors idle; A and A A, which are symmetric -> `stepgraph.kernels.gram`, which computes one triangle of tiles, where
that saves a round of tiles. The updates that read the results move behind the last of those matrices.
Tier numerics: other kernels add in another order, and scaling and adding round once. Preconditions: on a GPU, before
`inplace_update`; matrices whose results travel to other ranks before the next is there are not joined with it, and none
where the optimizer's state may go to the host, which updates parameters in parts.
Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.costs.hardware import ASSUMED, GRAM_REACHED, PRODUCTS_REACHED
from stepgraph.costs.tiles import gram_seconds, product_seconds
from stepgraph.graph.aliases import Aliases, written_arguments
from stepgraph.graph.collectives import operator_of
from stepgraph.graph.edit import Builder, erase_unread
from stepgraph.graph.edit import replace as replace_node
from stepgraph.graph.facts import argument, is_mutating, is_random, only_user, packet, swapped, tensor_bytes
from stepgraph.graph.provenance import phase_of
from stepgraph.kernels import gram  # noqa: F401  (defines an operator of torch.ops.stepgraph)
from stepgraph.passes.contract import PassReport, StepGraph, register

aten, ours = torch.ops.aten, torch.ops.stepgraph
_PRODUCTS, _ADDED = (aten.mm.default, aten.bmm.default), (aten.addmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class OrthogonalizeOptions:
    """``reached``: the share of the rate of other products at which `gram` computes a tile. ``most``: bytes of matrices
    that are stacked."""

    reached: float = GRAM_REACHED / PRODUCTS_REACHED
    most: int = 256 << 20


class Iteration(NamedTuple):
    """Of ``x`` (..., M, N): ``a`` = x x^T, ``b`` = factors[1] a + factors[2] a a, ``result`` = factors[0] x + b x; from
    the ``right`` a = x^T x, result = factors[0] x + x b."""

    x: fx.Node
    a: fx.Node
    b: fx.Node
    result: fx.Node
    factors: tuple[float, float, float]
    right: bool


@register(
    "orthogonalize",
    "numerics",
    options=OrthogonalizeOptions(),
    needs_cuda=True,
    from_options=lambda options: {"most": 0} if options.may_offload_optimizer else {},
)
def orthogonalize(step: StepGraph, options: OrthogonalizeOptions, report: PassReport) -> None:
    """Orthogonalize Muon's updates by products over several matrices, and symmetric ones by half."""
    chains = _chains(step)
    report.matched = len(chains)
    groups = list(_groups(step, chains, options))
    sizes = [len(group) for group in groups if len(group) > 1]
    for group in groups:
        if len(group) > 1 or any(i.result.target not in _ADDED for i in group[0]):
            _write(group)
            report.changed += len(group)
    aliases = Aliases(step.graph)
    symmetric = [node for node in step.nodes("optimizer") if _saves(node, aliases, options)]
    for node in symmetric:
        _halve(node)
    report.changed += len(symmetric)
    report.summary = (
        f"{report.matched} matrices orthogonalized, {sum(sizes)} of them in {len(sizes)} stacks; {len(symmetric)} "
        "symmetric products halved"
    )


def _chains(step: StepGraph) -> list[list[Iteration]]:
    """The iterations of each matrix, in the order in which the matrices are worked on."""
    aliases, products = Aliases(step.graph), [node for target in _PRODUCTS for node in step.calling(target)]
    found = {i.x: i for node in products if (i := _iteration(node, aliases)) is not None}
    later = {i.result for i in found.values()}
    chains = []
    for first in [i for x, i in found.items() if x not in later]:
        chains.append([first])
        while (following := found.get(chains[-1][-1].result)) is not None and _read_by(following):
            chains[-1].append(following)
    return chains


def _read_by(iteration: Iteration) -> bool:
    """Whether nothing but ``iteration`` reads what it begins with."""
    x, own = iteration.x, {iteration.a, iteration.result, *iteration.result.all_input_nodes}
    return all(user in own or (swapped(user) is x and set(user.users) <= own) for user in x.users)


def _iteration(a: fx.Node, aliases: Aliases) -> Iteration | None:
    """The iteration that begins with the product ``a``, if nothing writes into its ``x``."""
    if phase_of(a) != "optimizer" or a.meta["val"].dtype.itemsize != 2:
        return None
    left, right = a.args
    from_left = swapped(right) is left or swapped(left) is right
    starts = [(left, False)] * from_left + [(right, True)] * (swapped(left) is right)
    for b in _descendants(a) if starts else ():
        if (square := _sum_with_product(b, a, a, a)) is None:
            continue
        for result in _descendants(b):
            for x, on_right in starts:
                factors = _sum_with_product(result, x, *((x, b) if on_right else (b, x)))
                if factors is None or factors[1] != 1 or not _only_inside(a, b):
                    continue
                if not aliases.written_between(x, aliases.position[a], aliases.position[result]):
                    return Iteration(x, a, b, result, (factors[0], *square), on_right)
    return None


def _descendants(node: fx.Node) -> Iterator[fx.Node]:
    """What reads ``node``, and what reads that."""
    for user in node.users:
        yield user
        yield from user.users


def _only_inside(a: fx.Node, b: fx.Node) -> bool:
    """Whether ``a`` is read only for ``b``, and ``b`` for one product."""
    for_b = {b, *b.all_input_nodes, *(n for i in b.all_input_nodes for n in i.all_input_nodes)}
    return set(a.users) <= for_b and len(b.users) == 1


def _sum_with_product(node: fx.Node, added: fx.Node, left: fx.Node, right: fx.Node) -> tuple[float, float] | None:
    """(beta, alpha) where ``node`` is beta ``added`` + alpha ``left`` @ ``right``."""
    if node.target in _ADDED:
        alike = node.args == (added, left, right)
        return (argument(node, "beta"), argument(node, "alpha")) if alike else None
    if packet(node) is not aten.add or len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        (term, beta), (product, alpha) = _scaled(one), _scaled(other)
        if term is added and product.target in _PRODUCTS and only_user(other) is node:
            first, factor = _scaled(product.args[0])
            if (first, product.args[1]) == (left, right) and (product is other or only_user(product) is other):
                return beta, alpha * factor
    return None


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """(x, factor) of ``x * factor``; (node, 1) of others."""
    if node.target is aten.mul.Tensor and isinstance(node.args[1], (int, float)):
        return node.args[0], float(node.args[1])
    return node, 1.0


def _own_transpose(node: fx.Node) -> fx.Node | None:
    """What ``node`` multiplies with its own transpose."""
    if node.target not in _PRODUCTS:
        return None
    left, right = node.args
    return left if swapped(right) is left or swapped(left) is right else None


# ---- several matrices together ----


def _groups(step: StepGraph, chains: list[list[Iteration]], options: OrthogonalizeOptions) -> Iterator[list]:
    """Chains that are written together: of one form, none made of another's result, in numbers that fill the GPU."""
    forms = defaultdict(list)
    for chain in chains:
        value = chain[0].x.meta["val"]
        forms[tuple(value.shape), value.dtype, tuple(i[4:] for i in chain)].append(chain)
    order = _Order(step)
    for alike in forms.values():
        most = max(1, options.most // tensor_bytes(alike[0][0].x))
        window: list[list[Iteration]] = []
        for chain in [*alike, None]:  # None: the end
            if window:
                full = len(window) == most or window[0][0].x.meta["val"].ndim > 2
                if full or chain is None or not order.may_wait(window, chain):
                    yield from _in_sizes(window, options)
                    window = []
            if chain is not None:
                window.append(chain)


def _in_sizes(window: list[list[Iteration]], options: OrthogonalizeOptions) -> Iterator[list]:
    """``window`` in consecutive parts of the size that takes the least time."""
    (*_, m, n), count = window[0][0].x.meta["val"].shape, len(window)
    m, n = (n, m) if window[0][0].right else (m, n)

    def seconds(batch: int) -> float:
        symmetric = (_symmetric_seconds(batch, m, k, options) for k in (n, m))
        return sum(symmetric) + product_seconds(ASSUMED, batch, m, m, n)

    def whole(size: int) -> float:
        return count // size * seconds(size) + (seconds(count % size) if count % size else 0.0)

    size = min(range(1, count + 1), key=whole)
    for start in range(0, count, size):
        yield window[start : start + size]


def _symmetric_seconds(batch: int, m: int, k: int, options: OrthogonalizeOptions) -> float:
    return min(product_seconds(ASSUMED, batch, m, k, m), gram_seconds(ASSUMED, batch, m, k, options.reached))


def _readers(order: Sequence[fx.Node], chains: Sequence[list[Iteration]], place: fx.Node) -> list[fx.Node]:
    """What reads the results of ``chains``, directly or not, before ``place``; ``order``: of the graph's nodes."""
    results = {chain[-1].result for chain in chains}
    found = set(results)
    for node in order:
        if node is place:
            break
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return [node for node in order if node in found - results]


class _Order:
    """The graph's nodes in order, and what may move in it."""

    def __init__(self, step: StepGraph):
        self.aliases, self.nodes = Aliases(step.graph), list(step.nodes("optimizer"))

    def may_wait(self, chains: Sequence[list[Iteration]], chain: list[Iteration]) -> bool:
        """Whether ``chains`` may begin where ``chain`` does, and what reads their results run after that: it neither
        multiplies nor communicates, and nothing before that reads or writes the same memory."""
        place, own, at = chain[0].a, set[fx.Node](), self.aliases.position
        if any(self.aliases.written_between(one[0].x, at[one[0].a], at[place]) for one in chains):
            return False
        read: dict[fx.Node | None, int] = {}  # by memory, the first of these nodes
        written: dict[fx.Node | None, int] = {}
        for node in _readers(self.nodes, chains, place):
            if operator_of(node) or node.target in (*_PRODUCTS, *_ADDED) or node is chain[0].x:
                return False
            own.add(node)
            for memory, found in zip(self._memory(node), (read, written), strict=True):
                for root in memory:
                    found.setdefault(root, at[node])
        for node in self.nodes if own else ():
            if at[node] >= at[place]:
                break
            if node not in own:
                reads, writes = self._memory(node)
                if any(written.get(root, at[place]) < at[node] for root in reads | writes):
                    return False
                if any(read.get(root, at[place]) < at[node] for root in writes):
                    return False
        return True

    def _memory(self, node: fx.Node) -> tuple[set[fx.Node | None], set[fx.Node | None]]:
        """What ``node`` reads and what it writes: None, where that is the state of a random generator."""
        writes = {self.aliases.root(one) for one in (written_arguments(node) if is_mutating(node) else ())}
        writes |= {None} if is_random(node) else set()
        return {self.aliases.root(one) for one in node.all_input_nodes}, writes


def _write(chains: list[list[Iteration]]) -> None:
    """Compute ``chains``, stacked where they are several, where the last of them begins."""
    last, several = chains[-1][0].a, len(chains) > 1
    readers = _readers(list(last.graph.nodes), chains, last)
    build = Builder(*(chain[0].a for chain in chains), before=last)
    x = build(aten.stack.default, [chain[0].x for chain in chains]) if several else chains[0][0].x
    rank = x.meta["val"].ndim
    multiply, add = (_PRODUCTS[rank - 2], _ADDED[rank - 2])
    for iteration in chains[0]:
        own, square, product = iteration.factors
        turned = build(aten.transpose.int, x, rank - 2, rank - 1)
        a = build(multiply, turned, x) if iteration.right else build(multiply, x, turned)
        b = build(add, a, a, a, beta=square, alpha=product)
        x = build(add, x, *((x, b) if iteration.right else (b, x)), beta=own)
    parts = build(aten.unbind.int, x) if several else x
    results = {}
    for i, chain in enumerate(chains):
        old, new = chain[-1].result, build(operator.getitem, parts, i) if several else x
        if old.meta["val"].stride() != new.meta["val"].stride():  # it lies column by column, as its readers have it
            turned = build(aten.transpose.int, new, -2, -1)
            turned = build(aten.clone.default, turned, memory_format=torch.contiguous_format)
            new = build(aten.transpose.int, turned, -2, -1)
        results[old] = new
    for node in readers:
        last.prepend(node)
    for old, new in results.items():
        replace_node(old, new, sweep=True)


# ---- half of symmetric products ----


def _saves(node: fx.Node, aliases: Aliases, options: OrthogonalizeOptions) -> bool:
    """Whether ``node`` multiplies a matrix with its transpose or such a product with itself, and `gram` is forecast to
    be faster."""
    if node.target not in (*_PRODUCTS, *_ADDED):
        return False
    x, at = node.args[0], aliases.position
    if any(one is not x for one in node.args):
        x = _own_transpose(node)
    elif _own_transpose(x) is None or aliases.written_between(x, at[x], at[node]):
        return False
    if x is None or x.meta["val"].dtype.itemsize != 2:
        return False
    *batch, m, k = x.meta["val"].shape
    full = product_seconds(ASSUMED, batch[0] if batch else 1, m, k, m)
    return gram_seconds(ASSUMED, batch[0] if batch else 1, m, k, options.reached) < full


def _halve(node: fx.Node) -> None:
    """Compute ``node``, a symmetric product, by `gram`."""
    added, beta, alpha = None, 0.0, 1.0
    x = _own_transpose(node) or node.args[0]
    if node.target in _ADDED:
        added, beta, alpha = x, argument(node, "beta"), argument(node, "alpha")
    used = node.all_input_nodes
    replace_node(node, Builder(node, before=node)(ours.gram.default, x, added, float(beta), float(alpha)))
    erase_unread(*(one for one in used if one is not x))

"""The forward results to store for backward at a price per stored byte, so that the step takes the least time.

A result is stored, recomputed from stored results, or not needed. Each stored byte costs ``price`` seconds, and an
operator that runs again costs its seconds once, however many of its results are needed: a minimum cut between inputs
and what backward reads. As the price rises, less is stored and more is recomputed; between two adjacent choices, each
block may take either. Equal blocks get equal choices at one price, and are solved once.
Source: Picard, Maximal Closure of a Graph and Applications to Combinatorial Problems (1976).
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from torch import fx

from stepgraph.passes.memory.recompute import Plan

#: Prices and seconds are whole numbers of these, so that cuts are exact. The highest price, in seconds for each byte.
_UNIT, _HIGHEST = 1e-18, 1e-6


class _Result(NamedTuple):
    """``size``: bytes. ``read``: whether backward reads it. ``stored``: whether it may be stored. ``operator``: the
    number of the one that recomputes it; -1: none may."""

    size: int
    read: bool
    stored: bool
    operator: int


class _Form(NamedTuple):
    """Results that depend on each other, and the operators that recompute them: the cost of each, and the numbers of
    the results that it reads."""

    results: tuple[_Result, ...]
    operators: tuple[tuple[int, tuple[int, ...]], ...]


class Stores(NamedTuple):
    """A choice: the recomputed results that backward reads, by part; the seconds that this takes, in `_UNIT`; and the
    stored bytes."""

    dropped: tuple[frozenset[fx.Node], ...]
    seconds: int
    size: int

    @property
    def of_all(self) -> set[fx.Node]:
        """The recomputed results of all parts."""
        return set().union(*self.dropped)

    def mixed(self, other: "Stores", parts: Collection[int]) -> set[fx.Node]:
        """The recomputed results where the numbered ``parts`` choose as here, and the rest as ``other`` does."""
        chosen = enumerate(zip(self.dropped, other.dropped, strict=True))
        return set().union(*(here if number in parts else there for number, (here, there) in chosen))


class LeastTime:
    """The choices for a step. ``reads``: the results that backward reads. ``recomputable``: the results that may be
    recomputed. ``seconds``: the time of the operator that computes a result. ``sizes``: bytes."""

    def __init__(
        self,
        plan: Plan,
        reads: Collection[fx.Node],
        recomputable: Collection[fx.Node],
        sizes: Mapping[fx.Node, int],
        seconds: Callable[[fx.Node], float],
    ):
        self.plan, self.reads, self.recomputable, self.sizes, self.seconds = plan, reads, recomputable, sizes, seconds
        sources: dict[fx.Node, list[fx.Node]] = {}
        queue = list(reads)
        while queue:
            root = queue.pop()
            if root not in sources:
                given = plan.sources(root) if root in recomputable else []
                # What is read and never recomputed is stored anyway.
                sources[root] = [s for s in given if s.op == "call_function" and (s not in reads or s in recomputable)]
                queue += sources[root]
        self.sources = sources
        self.parts = self._parts()
        self.forms = [self._form(part) for part in self.parts]

    def _parts(self) -> list[list[fx.Node]]:
        """Results that depend on each other, in order."""
        part_of: dict[fx.Node, list[fx.Node]] = {}
        operators: dict[fx.Node, fx.Node] = {}
        for root, given in self.sources.items():
            part = part_of.setdefault(root, [root])
            for other in (*given, operators.setdefault(self.plan.operator(root), root)):
                joined = part_of.setdefault(other, [other])
                if joined is not part:
                    part, joined = (part, joined) if len(part) >= len(joined) else (joined, part)
                    part += joined
                    part_of |= dict.fromkeys(joined, part)
        position = self.plan.aliases.position
        parts = {id(part): sorted(part, key=position.__getitem__) for part in part_of.values()}
        return sorted(parts.values(), key=lambda part: position[part[0]])

    def _form(self, part: list[fx.Node]) -> _Form:
        number = {root: i for i, root in enumerate(part)}
        operators: dict[fx.Node, int] = {}
        costs, results = [], []
        for root in part:
            operator = -1
            if root in self.recomputable:
                made = self.plan.operator(root)
                operator = operators.setdefault(made, len(operators))
                if operator == len(costs):
                    seconds = round(float(f"{self.seconds(root):.6g}") / _UNIT)
                    costs.append((seconds, tuple(number[s] for s in self.sources[root])))
            read = root in self.reads
            results.append(_Result(self.sizes[root], read, read or root not in self.recomputable, operator))
        return _Form(tuple(results), tuple(costs))

    def at(self, price: float) -> Stores:
        """The choice that takes least time if each stored byte costs ``price`` seconds."""
        found = [_solved(form, round(min(price, _HIGHEST) / _UNIT)) for form in self.forms]
        dropped = (frozenset(part[i] for i in runs) for part, (runs, _, _) in zip(self.parts, found, strict=True))
        return Stores(tuple(dropped), sum(s for _, s, _ in found), sum(size for _, _, size in found))

    def between(self, low: Stores, high: Stores) -> Stores | None:
        """The choice at the price at which ``low`` and ``high``, which stores less, cost the same; None if no other one
        costs less there."""
        if low.size <= high.size:
            return None
        price = (high.seconds - low.seconds) / (low.size - high.size)
        found = self.at(price * _UNIT)
        less = low.seconds + price * low.size - (found.seconds + price * found.size)
        return found if high.size < found.size < low.size and less > 1e-6 * high.seconds else None


@functools.lru_cache(maxsize=1024)
def _solved(form: _Form, price: int) -> tuple[tuple[int, ...], int, int]:
    """(numbers of the recomputed results that are read, the cost, the stored bytes)."""
    import networkx as nx  # slow to load

    network = nx.DiGraph()
    network.add_nodes_from(("given", "backward"))
    for number, (cost, sources) in enumerate(form.operators):
        network.add_edge("given", ("runs", number), capacity=cost)
        for source in sources:
            network.add_edge(("needed", source), ("runs", number))
    for number, result in enumerate(form.results):
        if result.operator < 0:
            network.add_edge("given", ("needed", number), capacity=price * result.size)
        else:
            recomputed = ("recomputed", number)
            network.add_edge(("runs", result.operator), recomputed)
            network.add_edge(
                recomputed, ("needed", number), **({"capacity": price * result.size} if result.stored else {})
            )
        if result.read:
            network.add_edge(("needed", number), "backward")
    _, (given, _) = nx.minimum_cut(network, "given", "backward")
    made = {i for i, r in enumerate(form.results) if r.operator >= 0 and ("recomputed", i) not in given}
    cost = sum(cost for number, (cost, _) in enumerate(form.operators) if ("runs", number) not in given)
    size = sum(r.size for i, r in enumerate(form.results) if ("needed", i) not in given and i not in made)
    return tuple(i for i in sorted(made) if form.results[i].read), cost, size

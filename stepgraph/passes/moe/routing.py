"""Finds where a graph sorts the slots of tokens by their experts, as transformers' experts do."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import is_written
from stepgraph.graph.facts import RESHAPES, argument, behind_reshapes, getitem_users

aten = torch.ops.aten
INDEXINGS = (aten.index_put.default, aten._index_put_impl.default)


@dataclass
class Routing:
    """One sort of slots by expert. ``sort``: the graph's own node, and by name what is made of it. Our nodes: ``order``
    (R,), ``places`` (N, K) and ``counts`` (E,), each int32."""

    sort: fx.Node
    chosen: fx.Node
    experts: int
    ids: fx.Node
    permutation: fx.Node
    counted: fx.Node
    order: fx.Node | None = None
    places: fx.Node | None = None
    counts: fx.Node | None = None

    @property
    def slots(self) -> int:
        return self.chosen.meta["val"].shape[1]

    @property
    def tokens(self) -> int:
        return self.chosen.meta["val"].shape[0]


def routing_of(sort: fx.Node) -> Routing | str:
    """The routing of a sort, or why it is none that we know."""
    flat, outputs = sort.args[0], getitem_users(sort)
    permutation = outputs.get(1)
    if permutation is None or flat.meta["val"].ndim != 1 or argument(sort, "descending"):
        return "no permutation of one dimension in ascending order"
    chosen = flat.args[0] if flat.target in RESHAPES else None
    if chosen is None or chosen.meta["val"].ndim != 2 or chosen.meta["val"].dtype not in (torch.int64, torch.int32):
        return "what is sorted is not a matrix of experts"
    counted = next(iter(_counted(outputs.get(0))), None)
    if counted is None:
        return "the rows of its experts are not counted by histc and cumsum"
    experts = argument(counted.args[0], "bins")
    if _options_of_topk(chosen) != experts:
        return f"the experts are not chosen by topk over the {experts} that are counted"
    behind = [flat]
    while behind[-1].target is not operator.getitem:
        behind.append(behind[-1].args[0])
    histogram = counted.args[0]
    if written := [n for n in (*behind, *outputs.values(), histogram.args[0], histogram) if is_written(n)]:
        return f"{written[0].name} is written to"
    return Routing(sort, chosen, experts, outputs[0], permutation, counted)


def _counted(ids: fx.Node | None) -> Iterator[fx.Node]:
    """Offsets from the sorted experts: int32 cumulative counts of each number from 0 upwards."""
    for user in ids.users if ids is not None else ():
        counts = [user, *user.users] if user.target is aten._to_copy.default else [user]
        for histogram in counts:
            if histogram.target is not aten.histc.default:
                continue
            bins, low, high = (argument(histogram, name) for name in ("bins", "min", "max"))
            if (low, high) != (0, bins - 1):
                continue
            for offsets in histogram.users:
                if offsets.target is aten.cumsum.default and offsets.meta["val"].dtype == torch.int32:
                    yield offsets


def _options_of_topk(chosen: fx.Node) -> int | None:
    """How many there were to choose from, if a ``topk`` along the last dimension chose."""
    chosen = behind_reshapes(chosen, aten._to_copy.default, aten.clone.default, aten.detach.default)
    topk = chosen.args[0] if chosen.op == "call_function" and chosen.args else None
    if not isinstance(topk, fx.Node) or topk.target is not aten.topk.default or chosen.args[1] != 1:
        return None
    scores = topk.args[0].meta["val"]
    return scores.shape[-1] if argument(topk, "dim") in (-1, scores.ndim - 1) else None


def counts_experts(sort: fx.Node) -> bool:
    """Whether ``sort``'s values are counted like experts; other sorts are ignored."""
    return next(iter(_counted(getitem_users(sort).get(0))), None) is not None

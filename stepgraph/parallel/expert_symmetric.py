"""Experts' tokens over symmetric memory: only existing rows are sent, directly to their destination.

    dispatch: x (N, D) -> each slot's row to its place among the rows of its expert
    combine:  results -> each row back to its place among the token's -> each token's weighted sum, (N, D)

All ranks know all counts, and so where each row stands at the other side: no part is padded, nothing is sorted where it
arrives. Rows have the order of `stepgraph.parallel.experts.ExpertExchange`, and results its bits. The room of a rank's
experts is that of all its parts there, which any ranks may fill: fewer steps exceed it.

It is an exchange of its own and no pass over the other's nodes: buffers of tokens have another size, places in them are
other ones, and another condition says whether a step fits. A pass would have to undo the arithmetic of padded parts.
"""

from typing import Any

import torch
import torch.distributed as dist

from stepgraph.capture.roles import declare
from stepgraph.graph.collectives import spans_machines
from stepgraph.kernels.comm.expert_rows import all_counts, exchange_rows, expert_places
from stepgraph.kernels.moe import combine_rows, sort_by_expert
from stepgraph.parallel.experts import Capacity, ExpertExchange
from stepgraph.parallel.mesh import Axes

Tensor = torch.Tensor


class SymmetricExchange(ExpertExchange):
    """The exchange over ``ep`` by kernels that write into other ranks' memory; over gloo, point to point.

    Raises ``ValueError`` if ranks of ``ep`` are on several machines.
    """

    def __init__(self, axes: Axes, capacity: Capacity):
        super().__init__(axes, capacity)
        if apart := spans_machines(self.group.group_name):
            raise ValueError(
                f"expert_exchange=symmetric over ep={self.ranks}: {apart}; make ep smaller, or use collectives"
            )

    def dispatch(self, x: Tensor, chosen: Tensor, n_experts: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """As `ExpertExchange.dispatch`."""
        here = n_experts // self.ranks
        order, places, counts = sort_by_expert(chosen, n_experts)
        counts, place = all_counts(counts, self.group)  # (P, E)
        declare(counts, "dispatch", "ep")
        received = counts.sum(0).view(self.ranks, here).sum(1)  # by each rank
        room = self.ranks * self._room(*chosen.shape, here, (received.amax() + self.ranks - 1) // self.ranks)
        there, back, ends = expert_places(counts, place, order.numel(), room)
        rows = _ToExperts.apply(x, order, places, there, back, self.group)
        return rows, ends, (order, places, there, back)

    def combine(self, rows: Tensor, weights: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        """As `ExpertExchange.combine`."""
        order, places, there, back = state
        return combine_rows(_ToTokens.apply(rows, there, back, self.group), places, weights, order)


class _ToExperts(torch.autograd.Function):
    """(N, D) -> (room, D); its gradient travels back, and each token adds up its slots'."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, places: Tensor, there: Tensor, back: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(order, places, there, back)
        return _exchange(x, order, places.shape[1], there, back, group, "dispatch")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, places, there, back = ctx.saved_tensors
        rows = _exchange(grad, None, 1, back, there, ctx.group, "dispatch")
        return combine_rows(rows, places, None, order), None, None, None, None, None


class _ToTokens(torch.autograd.Function):
    """(room, D) -> (N * K, D), and its gradient in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(there, back)
        return _exchange(rows, None, 1, back, there, group, "combine")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        there, back = ctx.saved_tensors
        return _exchange(grad, None, 1, there, back, ctx.group, "combine"), None, None, None


def _exchange(
    x: Tensor, order: Tensor | None, slots: int, to: Tensor, came: Tensor, group: dist.ProcessGroup, kind: str
) -> Tensor:
    rows = exchange_rows(x, order, slots, to, came, group)
    declare(rows, kind, "ep")
    return rows

"""The exchange between tokens and experts, on one rank. Expert parallelism puts another in its place."""

from typing import Any, Protocol

import torch

from stepgraph.kernels.moe import combine_rows, gather_rows, sort_by_expert


class Exchange(Protocol):
    """Brings tokens to experts, sorted, and their results back."""

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``x`` (N, D), ``chosen`` (N, K) int64 -> rows (R, D) sorted by the experts that are here, the ends of each
        one's rows (E_local,) int32, and what `combine` needs."""

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, state: Any) -> torch.Tensor:
        """The experts' rows (R, D), ``weights`` (N, K) fp32 -> (N, D), the weighted sum over each token's experts."""


class LocalExchange:
    """All experts are on this rank: the exchange is a permutation."""

    def dispatch(
        self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        order, places, counts = sort_by_expert(chosen, n_experts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return gather_rows(x, order, places), offsets, (order, places)

    def combine(
        self, rows: torch.Tensor, weights: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        order, places = state
        return combine_rows(rows, places, weights, order)

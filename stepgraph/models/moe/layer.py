"""The mixture-of-experts layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, sort_by_expert
from stepgraph.models.decoder import SwiGLU
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.router import Router
from stepgraph.regions import region


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm`, under autocast in its dtype, as in ``nn.Linear``."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    return grouped_mm(rows, weight, offsets)


class GroupedLinear(nn.Module):
    """One linear map for each expert, without bias: ``weight`` is (E, out, in).

    ``forward(rows, offsets)``: rows (R, in) sorted by expert, ``offsets`` (E,) int32 the ends of the experts' rows.
    """

    def __init__(self, n_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, in) -> (R, out)
        return grouped_product(rows, self.weight.mT, offsets)


class Experts(nn.Module):
    """A SwiGLU for each expert, ``down(silu(gate(x)) * up(x))``; the products by gate and up are one."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_up_proj = GroupedLinear(n_experts, dim, 2 * ffn_dim)
        self.down_proj = GroupedLinear(n_experts, ffn_dim, dim)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, D) -> (R, D)
        gate, up = self.gate_up_proj(rows, offsets).chunk(2, dim=-1)  # (R, F) each
        return self.down_proj(F.silu(gate) * up, offsets)


class Exchange:
    """Brings tokens to experts, sorted, and their results back. Where all experts are on this rank: a permutation."""

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``x`` (N, D), ``chosen`` (N, K) int64 -> rows (R, D) sorted by the experts that are here, the ends of each
        one's rows (E_local,) int32, and what `combine` needs."""
        order, places, counts = sort_by_expert(chosen, n_experts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return gather_rows(x, order, places), offsets, (order, places)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, state: Any) -> torch.Tensor:
        """The experts' rows (R, D), ``weights`` (N, K) fp32 -> (N, D), the weighted sum over each token's experts."""
        order, places = state
        return combine_rows(rows, places, weights, order)


class MoE(nn.Module):
    """Each token through its ``top_k`` experts, weighted, and through the shared ones. No token is dropped."""

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.n_experts = config.n_experts
        self.router = Router(dim, config)
        self.experts = Experts(config.n_experts, dim, config.ffn_dim)
        self.shared = SwiGLU(dim, config.n_shared * config.ffn_dim) if config.n_shared else None
        self.exchange = Exchange()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        tokens = x.flatten(0, 1)  # (N, D)
        chosen, weights = self.router(tokens, x.shape[0])  # (N, K)
        with region("dispatch"):
            rows, offsets, state = self.exchange.dispatch(tokens, chosen, self.n_experts)  # (R, D)
        with region("compute"):
            rows = self.experts(rows, offsets)
        with region("combine"):
            y = self.exchange.combine(rows, weights, state).view_as(x)
        return y if self.shared is None else y + self.shared(x)

"""The experts of a layer, each product one operator for all of them."""

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.kernels.moe import grouped_mm


class GroupedLinear(nn.Module):
    """One linear map for each expert, without bias: ``weight`` is (E, out, in).

    ``forward(rows, offsets)``: rows (R, in) sorted by expert, ``offsets`` (E,) int32 the ends of the experts' rows.
    """

    def __init__(self, n_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, in) -> (R, out)
        weight = self.weight
        device = rows.device.type
        if torch.is_autocast_enabled(device):  # as in nn.Linear
            dtype = torch.get_autocast_dtype(device)
            rows, weight = rows.to(dtype), weight.to(dtype)
        return grouped_mm(rows, weight.mT, offsets)


class Experts(nn.Module):
    """A SwiGLU for each expert, ``down(silu(gate(x)) * up(x))``; the products by gate and up are one."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_up_proj = GroupedLinear(n_experts, dim, 2 * ffn_dim)
        self.down_proj = GroupedLinear(n_experts, ffn_dim, dim)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, D) -> (R, D)
        gate, up = self.gate_up_proj(rows, offsets).chunk(2, dim=-1)  # (R, F) each
        return self.down_proj(F.silu(gate) * up, offsets)

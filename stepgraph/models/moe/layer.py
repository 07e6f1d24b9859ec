"""The mixture-of-experts layer."""

import torch
from torch import nn

from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.exchange import Exchange, LocalExchange
from stepgraph.models.moe.experts import Experts
from stepgraph.models.moe.router import Router
from stepgraph.models.swiglu import SwiGLU
from stepgraph.regions import region


class MoE(nn.Module):
    """Each token through its ``top_k`` experts, weighted, and through the shared ones. No token is dropped."""

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.n_experts = config.n_experts
        self.router = Router(dim, config)
        self.experts = Experts(config.n_experts, dim, config.ffn_dim)
        self.shared = SwiGLU(dim, config.n_shared * config.ffn_dim) if config.n_shared else None
        self.exchange: Exchange = LocalExchange()

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

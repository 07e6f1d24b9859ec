"""The small, fast transformer of pytorch issue 179423, in which Inductor lost time in the norms' backward.

Eleven blocks of width 512, every norm without a weight, grouped-query attention with normalized queries and keys, a
squared leaky ReLU, and no position embedding: only the causal mask distinguishes positions.

Source: https://github.com/pytorch/pytorch/issues/179423 (the architecture and its settings).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.decoder import PLAN, Attention, Block, Decoder
from stepgraph.models.family import Family, check_heads, check_positive

#: The tensor-parallel plan: module -> style.
TP_PLAN = PLAN | {
    "layers.*.mlp_norm": "sequence_gather",
    "layers.*.mlp.up_proj": "columns",
    "layers.*.mlp.down_proj": "rows",
    "layers.*": "sequence",  # the residual scales
}

#: Fields of the configuration that the number of tensor-parallel ranks must divide.
TP_SIZES = ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


@dataclass(frozen=True)
class GolfConfig:
    """Shape of a golf model, by default that of pytorch issue 179423."""

    dim: int = 512  # width of the residual stream
    n_layers: int = 11  # number of blocks
    n_heads: int = 8  # query heads; head_dim is dim / n_heads
    n_kv_heads: int = 4  # key and value heads, each shared by n_heads / n_kv_heads query heads
    ffn_dim: int = 2048  # width of the feed-forward
    vocab_size: int = 4096  # rows of the embedding and of the head
    negative_slope: float = 0.5  # slope of the leaky ReLU below zero, before the square
    residual_scales: bool = False  # a learned scale per channel on each residual branch

    tie_embeddings = False  # no field: never

    def __post_init__(self) -> None:
        check_positive(self, "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        check_heads(self.dim, self.n_heads, self.n_kv_heads)

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def score_flops(self) -> int:
        """Multiplications of a query with a key, and of the score with the value, in all heads of a layer."""
        return 2 * self.dim

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters, all ``active``; without ``lookup_table``, the embedding is left out."""
        block = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads) + 2 * self.dim * self.ffn_dim
        scales = 2 * self.dim if self.residual_scales else 0
        tables = 2 if lookup_table else 1
        return self.n_layers * (block + scales) + tables * self.vocab_size * self.dim


def _norm(dim: int) -> nn.RMSNorm:
    """RMSNorm without a weight; its eps is torch's default, the machine epsilon of the dtype it computes in."""
    return nn.RMSNorm(dim, elementwise_affine=False)


class MLP(nn.Module):
    """``down(leaky_relu(up(x)) ** 2)``."""

    def __init__(self, config: GolfConfig):
        super().__init__()
        self.negative_slope = config.negative_slope
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        return self.down_proj(F.leaky_relu(self.up_proj(x), self.negative_slope).square())


class Golf(Decoder):
    """The golf model: see `Decoder`. It has no position embedding, and so takes sequences of any length."""

    def __init__(self, config: GolfConfig):
        c = config
        # The pytorch issue's code repeats k and v for each query head; grouped attention needs no copies.
        blocks = (
            Block(c.dim, _norm, Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, _norm), MLP(c), c.residual_scales)
            for _ in range(c.n_layers)
        )
        super().__init__(config, blocks, _norm, rope_dim=0)
        self.embed_norm = _norm(config.dim)


def golf() -> GolfConfig:
    """The settings of pytorch issue 179423: 35.9M parameters."""
    return GolfConfig()


GOLF = Family("golf", GolfConfig, Golf, lambda config: TP_PLAN, TP_SIZES)  # no positions: any length of sequence

"""Qwen3-MoE as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: Qwen Team, "Qwen3 Technical Report", 2025, section 2; Hugging Face's ``Qwen3MoeForCausalLM`` for the layout of
the weights. Every block has experts, none is shared.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from stepgraph.models.checks import check_heads, check_positive
from stepgraph.models.decoder import Attention, Block
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.decoder import MoEDecoder
from stepgraph.models.moe.layer import MoE
from stepgraph.models.rope import YarnScaling


@dataclass(frozen=True)
class Qwen3MoEConfig:
    """Shape of a Qwen3-MoE model."""

    dim: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads, each shared by n_heads / n_kv_heads query heads
    head_dim: int  # width of one head
    moe: MoEConfig  # the experts of every block
    vocab_size: int  # rows of the embedding and of the head
    max_seq_len: int  # longest sequence forward takes; the length of the RoPE tables
    rope_theta: float = 1_000_000.0  # base of the RoPE frequencies
    rope_scaling: YarnScaling | None = None  # YaRN's stretch of the low frequencies
    norm_eps: float = 1e-6  # eps of every RMSNorm
    tie_embeddings: bool = False  # the head uses the embedding's weight

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a shape that cannot be built."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len")
        check_positive(self, *sizes, "rope_theta", "norm_eps")
        check_heads(self.n_heads * self.head_dim, self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, RoPE rotates pairs; try {self.head_dim + 1}")

    @property
    def score_flops(self) -> int:
        """Multiplications of a query with a key, and of the score with the value, in all heads of a layer."""
        return self.n_heads * 2 * self.head_dim

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters; without ``lookup_table``, an embedding that is not also the head is left out;
        ``active``: of the experts, only as many as one token meets."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads) + 2 * self.head_dim
        block = attention + self.moe.num_params(self.dim, active=active) + 2 * self.dim
        tables = 2 if lookup_table and not self.tie_embeddings else 1
        return self.n_layers * block + self.dim + tables * self.vocab_size * self.dim


class Qwen3MoE(MoEDecoder):
    """Qwen3-MoE: see `MoEDecoder`. Queries and keys are normalized per head."""

    def __init__(self, config: Qwen3MoEConfig):
        c, yarn = config, config.rope_scaling
        scale = None if yarn is None else c.head_dim**-0.5 * yarn.score_scale
        blocks = (
            Block(
                c.dim,
                c.norm_eps,
                Attention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, partial(nn.RMSNorm, eps=c.norm_eps), scale),
                MoE(c.dim, c.moe),
            )
            for _ in range(c.n_layers)
        )
        super().__init__(config, blocks, config.head_dim, yarn)


def qwen3_30b_a3b() -> Qwen3MoEConfig:
    """Qwen3-30B-A3B: 30,532,122,624 parameters, 3.3B of them active."""
    return Qwen3MoEConfig(
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        moe=MoEConfig(n_experts=128, top_k=8, ffn_dim=768),
        vocab_size=151_936,
        max_seq_len=40_960,
    )

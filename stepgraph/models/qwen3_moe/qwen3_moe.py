"""Qwen3-MoE as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: Qwen Team, "Qwen3 Technical Report", 2025, section 2; Hugging Face's ``Qwen3MoeForCausalLM`` for the layout of
the weights. Every block has experts, none is shared.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.cache import LayerCache
from stepgraph.models.checks import check_heads, check_positive
from stepgraph.models.documents import attend_within
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.decoder import MoEDecoder
from stepgraph.models.moe.layer import MoE
from stepgraph.models.rope import YarnScaling, apply_rope


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


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE, whose queries and keys are normalized per head."""

    def __init__(self, config: Qwen3MoEConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.gqa = config.n_kv_heads != config.n_heads
        self.q_proj = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        yarn = config.rope_scaling
        self.scale = None if yarn is None else config.head_dim**-0.5 * yarn.score_scale

    def forward(
        self,
        x: torch.Tensor,  # (B, T, D)
        cos: torch.Tensor,  # (T, 1, head_dim) or, with positions, (B, T, 1, head_dim)
        signed_sin: torch.Tensor,  # the same
        cache: LayerCache | None = None,  # given: of the tokens before, and to be kept for those after
        mask: torch.Tensor | None = None,  # of `document_mask`; None: causal
    ) -> torch.Tensor:  # (B, T, D)
        B, T, _ = x.shape
        # The head count is left to view (-1), so that projections split over tensor-parallel ranks work unchanged.
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim))  # (B, T, H, head_dim)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim))  # (B, T, H_kv, head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H_kv, head_dim)
        q, k = apply_rope(q, cos, signed_sin), apply_rope(k, cos, signed_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, head_dim)
        if cache is not None:
            k, v = cache.extend(k, v)
        if mask is None:
            causal = cache is None or T > 1
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.gqa, scale=self.scale)
        else:
            y = attend_within(q, k, v, mask, self.scale)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """Pre-norm attention and experts, each added to the residual stream."""

    def __init__(self, config: Qwen3MoEConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MoE(config.dim, config.moe)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # (B, T, D)
        x = x + self.attn(self.attn_norm(x), cos, signed_sin, cache=cache, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class Qwen3MoE(MoEDecoder):
    """Qwen3-MoE: see `MoEDecoder`."""

    def __init__(self, config: Qwen3MoEConfig):
        super().__init__(config, (Block(config) for _ in range(config.n_layers)), config.head_dim, config.rope_scaling)


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

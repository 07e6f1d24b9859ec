"""Llama 3 as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: "The Llama 3 Herd of Models", 2024, section 3.2; Hugging Face's ``LlamaForCausalLM`` for the RoPE layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from stepgraph.errors import unknown_name
from stepgraph.models.cache import Cache, LayerCache, tokens_in
from stepgraph.models.checks import check_heads, check_positive
from stepgraph.models.documents import attend_within, check_positions, document_mask
from stepgraph.models.init import Part, init_parameters
from stepgraph.models.rope import RopeScaling, apply_rope, rope_tables
from stepgraph.models.swiglu import SwiGLU

AttentionName = Literal["sdpa", "flex"]

#: The tensor-parallel plan: module -> style. Not used here; `stepgraph.parallel` applies it.
TP_PLAN = {
    "embed": "embedding",
    "layers.*.attn_norm": "sequence_gather",
    "layers.*.attn.[qkv]_proj": "columns",
    "layers.*.attn.o_proj": "rows",
    "layers.*.mlp_norm": "sequence_gather",
    "layers.*.mlp.gate_proj": "columns",
    "layers.*.mlp.up_proj": "columns",
    "layers.*.mlp.down_proj": "rows",
    "norm": "sequence_gather",
    "head": "columns",
}

#: Fields of the configuration that the number of tensor-parallel ranks must divide.
TP_SIZES = ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


@dataclass(frozen=True)
class Llama3Config:
    """Shape of a Llama 3 model."""

    dim: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # query heads; head_dim is dim / n_heads
    n_kv_heads: int  # key and value heads, each shared by n_heads / n_kv_heads query heads
    ffn_dim: int  # width of the SwiGLU feed-forward
    vocab_size: int  # rows of the embedding and of the head
    max_seq_len: int  # longest sequence forward takes; the length of the RoPE tables
    rope_theta: float = 500_000.0  # base of the RoPE frequencies
    rope_scaling: RopeScaling | None = None  # Llama 3.1's stretch of the low frequencies
    norm_eps: float = 1e-5  # eps of every RMSNorm
    tie_embeddings: bool = False  # the head uses the embedding's weight
    attention: AttentionName = "sdpa"  # scaled_dot_product_attention or FlexAttention

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a shape that cannot be built."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")
        check_positive(self, *sizes, "rope_theta", "norm_eps")
        check_heads(self.dim, self.n_heads, self.n_kv_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (dim={self.dim} / n_heads={self.n_heads}) is odd, RoPE rotates pairs; "
                f"try dim={self.dim + self.n_heads}"
            )
        if self.attention not in get_args(AttentionName):
            raise unknown_name("attention", self.attention, get_args(AttentionName))

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    def num_params(self, *, lookup_table: bool = True) -> int:
        """Number of parameters; without ``lookup_table``, an embedding that is not also the head is left out."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        table = self.vocab_size * self.dim
        tables = 2 if lookup_table and not self.tie_embeddings else 1
        return self.n_layers * block + self.dim + tables * table


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE."""

    def __init__(self, config: Llama3Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.gqa = config.n_kv_heads != config.n_heads
        kv_dim = config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,  # (B, T, D)
        cos: torch.Tensor,  # (T, 1, head_dim) or, with positions, (B, T, 1, head_dim)
        signed_sin: torch.Tensor,  # the same
        mask: BlockMask | torch.Tensor | None,  # None: causal; BlockMask: by FlexAttention; else of `document_mask`
        cache: LayerCache | None = None,  # given: of the tokens before, and to be kept for those after
    ) -> torch.Tensor:  # (B, T, D)
        B, T, _ = x.shape
        # The head count is left to view (-1), so that projections split over tensor-parallel ranks work unchanged.
        q = apply_rope(self.q_proj(x).view(B, T, -1, self.head_dim), cos, signed_sin)  # (B, T, H, head_dim)
        k = apply_rope(self.k_proj(x).view(B, T, -1, self.head_dim), cos, signed_sin)  # (B, T, H_kv, head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H_kv, head_dim)
        # Views, not copies: the attention kernels read any strides, and their output has the layout of q.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, head_dim)
        if cache is not None:
            k, v = cache.extend(k, v)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None or T > 1, enable_gqa=self.gqa)
        elif isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=self.gqa)
        else:
            y = attend_within(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Llama3Config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_dim)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        mask: BlockMask | torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        x = x + self.attn(self.attn_norm(x), cos, signed_sin, mask, cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class Llama3(nn.Module):
    """Llama 3: ``forward(tokens)`` takes (B, T) int64 and returns logits (B, T, V); with a ``cache``, of the tokens
    that follow those in it; with ``positions`` (B, T), of packed documents that do not see each other (see
    `stepgraph.models.documents`).

    Built directly, its weights are initialized. Built under ``torch.device("meta")``, call ``to_empty(device=...)`` and
    then :meth:`init_weights`. With tied embeddings there is no ``head`` module, so the tie survives both.
    """

    rope_cos: torch.Tensor  # (max_seq_len, 1, head_dim) fp32, not in the state dict
    rope_sin: torch.Tensor  # the same, its first half negated: see rope_tables

    def __init__(self, config: Llama3Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(config.max_seq_len, 1, config.head_dim, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_weights()

    def init_weights(self, seed: int | None = None, parts: Mapping[str, Part] | None = None) -> None:
        """Fill parameters and RoPE tables in place; ``seed`` and ``parts`` as in `init_parameters`."""
        init_parameters(self, self.config.n_layers, seed, parts)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill only the RoPE tables: for a model built on meta whose weights come from a checkpoint."""
        if self.rope_cos.is_meta:
            return
        config = self.config
        cos, signed_sin = rope_tables(config.max_seq_len, config.head_dim, config.rope_theta, config.rope_scaling)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(signed_sin)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:  # (B, T) int64 -> (B, T, V)
        limit, start = self.config.max_seq_len, tokens_in(cache)
        T = start + tokens.shape[1]
        if limit < T:
            raise ValueError(f"sequence length {T} is above max_seq_len={limit}; shorten it or raise max_seq_len")
        if positions is not None:
            check_positions(positions, tokens, cache)
            if self.config.attention == "flex":
                raise ValueError("documents are kept apart by attention='sdpa', not by 'flex'; choose sdpa")
        x = self.embed(tokens)  # (B, T, D)
        # Tables in the residual stream's dtype, as in Hugging Face: a bf16 model rotates in bf16, with a rounding that
        # existing checkpoints were trained and served with; under autocast the stream, and so the rotation, is fp32.
        rows = slice(start, T) if positions is None else positions
        cos, signed_sin = self.rope_cos[rows].to(x.dtype), self.rope_sin[rows].to(x.dtype)
        flex = self.config.attention == "flex" and cache is None
        mask = causal_block_mask(T, x.device) if flex else None
        if positions is not None:
            mask = document_mask(positions, x.dtype)
        for block, kept in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = block(x, cos, signed_sin, mask, kept)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)  # (B, T, V)


def causal_block_mask(seq_len: int, device: torch.device, block: int = 128) -> BlockMask:
    """FlexAttention's mask for causal attention, written down directly.

    ``create_block_mask`` would evaluate all ``seq_len ** 2`` pairs. In the causal mask, query block ``i`` needs the key
    blocks before it in full and block ``i`` in part.
    """
    n = -(-seq_len // block)
    index = torch.arange(n, dtype=torch.int32, device=device)
    partial = index[:, None].expand(n, n)  # row i starts with block i; only the first kv_num_blocks[i] entries count
    full = index[None, :].expand(n, n)  # row i starts with blocks 0 to i - 1
    return BlockMask.from_kv_blocks(
        kv_num_blocks=torch.ones_like(index)[None, None],  # (1, 1, n)
        kv_indices=partial.contiguous()[None, None],  # (1, 1, n, n)
        full_kv_num_blocks=index[None, None],
        full_kv_indices=full.contiguous()[None, None],
        BLOCK_SIZE=block,
        mask_mod=_causal,
        seq_lengths=(seq_len, seq_len),
    )


def _causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= kv


def llama3_debug() -> Llama3Config:
    """6.1M parameters for a laptop CPU: 256 bytes and room for 64 special tokens.

    Four wide blocks rather than eight narrow ones: the same size trains a fifth faster on two CPU cores.
    """
    return Llama3Config(
        dim=384, n_layers=4, n_heads=6, n_kv_heads=3, ffn_dim=896, vocab_size=320, max_seq_len=2048, rope_theta=10_000.0
    )


def llama3_1b() -> Llama3Config:
    """Llama 3.2 1B: 1,235,814,400 parameters."""
    return Llama3Config(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=128_256,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_embeddings=True,
    )


def llama3_8b() -> Llama3Config:
    """Llama 3.1 8B: 8,030,261,248 parameters."""
    return _llama31(dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336)


def llama3_70b() -> Llama3Config:
    """Llama 3.1 70B: 70,553,706,496 parameters."""
    return _llama31(dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672)


def llama3_405b() -> Llama3Config:
    """Llama 3.1 405B: 405,853,388,800 parameters (with 8 key-value heads, as in the Hugging Face release)."""
    return _llama31(dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248)


def _llama31(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> Llama3Config:
    return Llama3Config(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128_256,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    )

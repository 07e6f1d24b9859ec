"""Shared parts of the decoders with RoPE: embedding, pre-norm blocks, grouped-query attention, head, RoPE tables, and
the keys and values of the tokens so far, which a model that generates text reads instead of computing them again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.documents import Context, attend_within, check_positions, own_mask, own_part
from stepgraph.models.init import Part, init_parameters
from stepgraph.models.rope import RopeScaling, YarnScaling, apply_rope, rope_tables

#: What the tensor-parallel plans of decoders share: module -> style. `stepgraph.parallel` applies them.
PLAN = {
    "embed": "embedding",
    "layers.*.attn_norm": "sequence_gather",
    "layers.*.attn.[qkv]_proj": "columns",
    "layers.*.attn.o_proj": "rows",
    "norm": "sequence_gather",
    "head": "columns",
}
#: The same of a dense block: path in the block -> style.
SWIGLU_PLAN = {
    "mlp_norm": "sequence_gather",
    "mlp.gate_proj": "columns",
    "mlp.up_proj": "columns",
    "mlp.down_proj": "rows",
}


class LayerCache:
    """Keys and values of one layer, with room for ``limit`` tokens. ``length``: tokens so far.

    They take ``B * limit * (H_k d_k + H_v d_v)`` elements of the model's dtype, allocated at the first token.
    """

    def __init__(self, limit: int):
        self.limit, self.length = limit, 0
        self._all: list[torch.Tensor] = []

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of the next tokens, (B, H_k, T, d_k) and (B, H_v, T, d_v), and returns all.

        Raises ``ValueError`` beyond ``limit``, and for several tokens at once after others, which would need a mask.
        """
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.limit:
            raise ValueError(f"{stop} tokens are more than the cache's {self.limit}; make it larger")
        if start and k.shape[2] > 1:
            raise ValueError(f"{k.shape[2]} tokens cannot be added at once after {start} others; pass them one by one")
        if not start:
            self._all = [x.new_empty(*x.shape[:2], self.limit, x.shape[3]) for x in (k, v)]
        for kept, new in zip(self._all, (k, v), strict=True):
            kept[:, :, start:stop] = new
        self.length = stop
        keys, values = (kept[:, :, :stop] for kept in self._all)
        return keys, values


Cache = Sequence[LayerCache]
Norm = Callable[[int], nn.Module]  # of the width, which it gives a norm for


class CausalAttention(nn.Module):
    """What attentions share: from queries, keys and values on. ``scale``: of the scores, None: d ** -0.5; ``gqa``:
    several heads of queries share one of keys."""

    o_proj: nn.Linear

    def __init__(self, scale: float | None, gqa: bool = False):
        super().__init__()
        self.scale, self.gqa = scale, gqa
        self.context: Context | None = None

    def attended(
        self,
        q: torch.Tensor,  # (B, T, H, d)
        k: torch.Tensor,  # (B, T, H_kv, d)
        v: torch.Tensor,  # (B, T, H_kv, d_v)
        mask: torch.Tensor | None,  # of `document_mask`; None: causal
        cache: LayerCache | None,  # given: of the tokens before, and to be kept for those after
    ) -> torch.Tensor:  # (B, T, D)
        # Views, not copies: the attention kernels read any strides, and their output has the layout of q.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, *)
        causal = cache is None or q.shape[2] > 1
        if cache is not None:
            k, v = cache.extend(k, v)
        attention = partial(self._attend, causal=causal, mask=mask)
        if self.context is None:
            y = attention(q, k, v)
        else:
            y = self.context.attend(attention, q, k, v, mask, self.scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, H, T, d), (B, H_kv, T, d) and (B, H_kv, T, d_v) -> (B, H, T, d_v)."""
        width, missing = v.shape[-1], q.shape[-1] - v.shape[-1]
        if v.device.type == "cpu" and missing > 0:  # its fused attention takes one width only
            return self._attend(q, k, F.pad(v, (0, missing)), causal, mask)[..., :width]
        if mask is not None:
            return attend_within(q, k, v, mask, self.scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.gqa, scale=self.scale)


class Attention(CausalAttention):
    """Causal grouped-query attention. ``norm``: width -> the norm of each head's queries and keys; None: no norm."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm: Norm | None = None,
        scale: float | None = None,
    ):
        super().__init__(scale, n_kv_heads != n_heads)
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = None if norm is None else norm(head_dim)
        self.k_norm = None if norm is None else norm(head_dim)

    def forward(
        self,
        x: torch.Tensor,  # (B, T, D)
        cos: torch.Tensor | None,  # (T, 1, head_dim) or, with positions, (B, T, 1, head_dim); None: no RoPE
        signed_sin: torch.Tensor | None,  # the same
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:  # (B, T, D)
        B, T, _ = x.shape
        # The head count is left to view (-1), so that projections split over tensor-parallel ranks work unchanged.
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H, head_dim)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H_kv, head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H_kv, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and signed_sin is not None:
            q, k = apply_rope(q, cos, signed_sin), apply_rope(k, cos, signed_sin)
        return self.attended(q, k, v, mask, cache)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; with ``scales``, scaled per channel."""

    def __init__(self, dim: int, norm: Norm, attn: nn.Module, mlp: nn.Module, scales: bool = False):
        super().__init__()
        self.attn_norm, self.attn = norm(dim), attn
        self.mlp_norm, self.mlp = norm(dim), mlp
        self.attn_scale = nn.Parameter(torch.ones(dim)) if scales else None
        self.mlp_scale = nn.Parameter(torch.ones(dim)) if scales else None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor | None,
        signed_sin: torch.Tensor | None,
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        attn = self.attn(self.attn_norm(x), cos, signed_sin, mask, cache=cache)
        x = x + (attn if self.attn_scale is None else self.attn_scale * attn)
        mlp = self.mlp(self.mlp_norm(x))
        return x + (mlp if self.mlp_scale is None else self.mlp_scale * mlp)


class Decoder(nn.Module):
    """A decoder: ``forward(tokens)`` takes (B, T) int64 and returns logits (B, T, V); with a ``cache``, of the tokens
    that follow those in it; with ``positions`` (B, T), of packed documents that do not see each other (see
    `stepgraph.models.documents`). With a ``context`` the logits are of this rank's part of the tokens.

    Built directly, its weights are initialized. Built under ``torch.device("meta")``, call ``to_empty(device=...)`` and
    then :meth:`init_weights`. With tied embeddings there is no ``head`` module, so the tie survives both.
    """

    rope_cos: torch.Tensor  # (max_seq_len, 1, rope_dim) fp32, not in the state dict; not there where rope_dim is 0
    rope_sin: torch.Tensor  # the same, its first half negated: see rope_tables

    def __init__(
        self,
        config: Any,
        blocks: Iterable[nn.Module],
        norm: Norm,
        rope_dim: int,
        scaling: RopeScaling | YarnScaling | None = None,
    ):
        super().__init__()
        self.config, self._rope_dim, self._scaling = config, rope_dim, scaling
        self.context: Context | None = None
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.embed_norm: nn.Module | None = None
        self.layers = nn.ModuleList(blocks)
        self.norm = norm(config.dim)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for name in ("rope_cos", "rope_sin") if rope_dim else ():
            table = torch.empty(config.max_seq_len, 1, rope_dim, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_weights()

    def init_weights(self, seed: int | None = None, parts: Mapping[str, Part] | None = None) -> None:
        """Fill parameters and buffers in place; ``seed`` and ``parts`` as in `init_parameters`."""
        init_parameters(self, self.config.n_layers, seed, parts)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill only the buffers, the RoPE tables: for a model built on meta whose weights come from a checkpoint."""
        if not self._rope_dim or self.rope_cos.is_meta:
            return
        cos, signed_sin = rope_tables(self.config.max_seq_len, self._rope_dim, self.config.rope_theta, self._scaling)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(signed_sin)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:  # (B, T) int64 -> (B, T, V)
        start = cache[0].length if cache else 0
        T = start + tokens.shape[1]
        if self._rope_dim and (limit := self.config.max_seq_len) < T:
            raise ValueError(f"sequence length {T} is above max_seq_len={limit}; shorten it or raise max_seq_len")
        if positions is not None:
            check_positions(positions, tokens, cache)
        x = self.embed(own_part(self, tokens))  # (B, T, D)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        cos = signed_sin = None
        if self._rope_dim:
            # In the residual stream's dtype, as in Hugging Face: a bf16 model rotates in bf16, with a rounding that
            # checkpoints were trained and served with; under autocast the stream, and so the rotation, is fp32.
            rows = slice(start, T) if positions is None else own_part(self, positions)
            cos, signed_sin = self.rope_cos[rows], self.rope_sin[rows]
            if positions is None:
                cos, signed_sin = own_part(self, cos, 0), own_part(self, signed_sin, 0)
            cos, signed_sin = cos.to(x.dtype), signed_sin.to(x.dtype)
        mask = own_mask(self, tokens, positions, x.dtype)
        for block, kept in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = block(x, cos, signed_sin, mask, kept)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)  # (B, T, V)

"""Llama 3 whose attention is FlexAttention's, with a causal block mask."""

from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from stepgraph.models import Llama3, Llama3Config
from stepgraph.models.decoder import Attention
from stepgraph.models.rope import apply_rope


@cache
def causal_mask(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device=device)


class FlexAttention(Attention):
    def forward(self, x, cos, signed_sin, mask, cache=None):
        B, T, _ = x.shape
        q, k, v = (proj(x).view(B, T, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, signed_sin), apply_rope(k, cos, signed_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = flex_attention(q, k, v, block_mask=causal_mask(T, x.device), enable_gqa=self.gqa)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def flex_llama(config: Llama3Config, length: int) -> Llama3:
    """``length``: of the sequences, whose mask is made here, outside of captures."""
    model = Llama3(config)
    causal_mask(length, model.norm.weight.device)
    for block in model.layers:
        block.attn.__class__ = FlexAttention
    return model

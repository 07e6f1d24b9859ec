"""DeepSeek-V3 as a plain ``nn.Module``, independent of graphs, meshes and tokenizers.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1; Hugging Face's ``DeepseekV3ForCausalLM`` for the
layout of the weights. Multi-token prediction is left out.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from stepgraph.models.decoder import PLAN, SWIGLU_PLAN, Block, CausalAttention, LayerCache, SwiGLU
from stepgraph.models.family import Family, check_positive
from stepgraph.models.hf_decoder import decoder_format, rope_from_hf, yarn_from_hf, yarn_to_hf
from stepgraph.models.moe import EXPERTS_PLAN, FREE, MoE, MoEConfig, MoEDecoder
from stepgraph.models.rope import YarnScaling, apply_rope_interleaved

#: Eps of the norms of the latents, in the checkpoints whatever the others' is.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Config:
    """Shape of a DeepSeek-V3 model."""

    dim: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_dense_layers: int  # the first blocks, which have no experts
    n_heads: int  # heads of the attention
    ffn_dim: int  # width of the dense blocks' SwiGLU
    moe: MoEConfig  # the other blocks' experts
    vocab_size: int  # rows of the embedding and of the head
    max_seq_len: int  # longest sequence forward takes; the length of the RoPE tables
    q_lora_rank: int | None = 1536  # width that queries are compressed to; None: they are not
    kv_lora_rank: int = 512  # width that keys and values are compressed to
    qk_nope_head_dim: int = 128  # part of a query's and key's head that is not rotated
    qk_rope_head_dim: int = 64  # part that is; all heads share that of the key
    v_head_dim: int = 128  # a value's head
    rope_theta: float = 10_000.0  # base of the RoPE frequencies
    rope_scaling: YarnScaling | None = None  # YaRN's stretch of the low frequencies
    norm_eps: float = 1e-6  # eps of the RMSNorms, except the latents'
    tie_embeddings: bool = False  # the head uses the embedding's weight

    def __post_init__(self) -> None:
        sizes = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size", "max_seq_len", "kv_lora_rank")
        heads = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_positive(self, *sizes, *heads, "rope_theta", "norm_eps")
        if self.q_lora_rank is not None:
            check_positive(self, "q_lora_rank")
        if not 0 <= self.n_dense_layers < self.n_layers:
            raise ValueError(
                f"n_dense_layers={self.n_dense_layers} must be at least 0 and below n_layers={self.n_layers}; "
                "give fewer, so that a layer with experts is left"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, RoPE rotates pairs; try {self.qk_rope_head_dim + 1}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query's and a key's head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_flops(self) -> int:
        """Multiplications of a query with a key, and of the score with the value, in all heads of a layer."""
        return self.n_heads * (self.qk_head_dim + self.v_head_dim)

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters; without ``lookup_table``, an embedding that is not also the head is left out;
        ``active``: only the experts that one token uses."""
        q_in, q_out = self.q_lora_rank, self.n_heads * self.qk_head_dim
        queries = self.dim * q_out if q_in is None else q_in * (self.dim + 1 + q_out)
        latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        heads = self.n_heads * (self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim))
        block = queries + latent + heads + self.n_heads * self.v_head_dim * self.dim + 2 * self.dim
        dense = self.n_dense_layers * 3 * self.dim * self.ffn_dim
        sparse = (self.n_layers - self.n_dense_layers) * self.moe.num_params(self.dim, active=active)
        tables = 2 if lookup_table and not self.tie_embeddings else 1
        return self.n_layers * block + dense + sparse + self.dim + tables * self.vocab_size * self.dim


class LatentAttention(CausalAttention):
    """Causal attention whose keys and values, and if asked queries, are compressed (multi-head latent attention)."""

    def __init__(self, config: DeepSeekV3Config):
        yarn = config.rope_scaling
        super().__init__(config.qk_head_dim**-0.5 * (1.0 if yarn is None else yarn.score_scale))
        self.config = config
        dim, rank, heads = config.dim, config.q_lora_rank, config.n_heads
        self.q_proj = self.q_a_proj = self.q_a_norm = self.q_b_proj = None
        if rank is None:
            self.q_proj = nn.Linear(dim, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(dim, rank, bias=False)
            self.q_a_norm = nn.RMSNorm(rank, eps=LATENT_EPS)
            self.q_b_proj = nn.Linear(rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj = nn.Linear(dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(config.kv_lora_rank, eps=LATENT_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,  # (B, T, D)
        cos: torch.Tensor,  # (T, 1, qk_rope_head_dim) or, with positions, (B, T, 1, qk_rope_head_dim)
        signed_sin: torch.Tensor,  # the same
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:  # (B, T, D)
        config = self.config
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        # The head count is left to unflatten (-1), so that projections split over tensor-parallel ranks work unchanged.
        q = self.q_proj(x) if self.q_b_proj is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (-1, config.qk_head_dim)).split((nope, rope), dim=-1)  # (B, T, H, *)
        latent, k_rope = self.kv_a_proj(x).split((config.kv_lora_rank, rope), dim=-1)  # (B, T, *)
        kv = self.kv_b_proj(self.kv_a_norm(latent)).unflatten(-1, (-1, nope + config.v_head_dim))
        k_nope, v = kv.split((nope, config.v_head_dim), dim=-1)  # (B, T, H, *)
        k_rope = apply_rope_interleaved(k_rope.unsqueeze(2), cos, signed_sin)  # (B, T, 1, rope)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)  # (B, T, H, qk_head_dim)
        q = torch.cat((q_nope, apply_rope_interleaved(q_rope, cos, signed_sin)), dim=-1)
        return self.attended(q, k, v, mask, cache)


class DeepSeekV3(MoEDecoder):
    """DeepSeek-V3: see `MoEDecoder`."""

    def __init__(self, config: DeepSeekV3Config):
        c, norm = config, partial(nn.RMSNorm, eps=config.norm_eps)
        mlps = (SwiGLU(c.dim, c.ffn_dim) if i < c.n_dense_layers else MoE(c.dim, c.moe) for i in range(c.n_layers))
        blocks = (Block(c.dim, norm, LatentAttention(c), mlp) for mlp in mlps)
        super().__init__(config, blocks, norm, c.qk_rope_head_dim, c.rope_scaling)


def deepseek_v3_debug() -> DeepSeekV3Config:
    """A small one for a laptop CPU: 256 bytes and room for 64 special tokens."""
    return DeepSeekV3Config(
        dim=256,
        n_layers=4,
        n_dense_layers=1,
        n_heads=4,
        ffn_dim=704,
        moe=MoEConfig(
            n_experts=16,
            top_k=3,
            ffn_dim=192,
            n_shared=1,
            scoring="sigmoid",
            scale=1.5,
            n_groups=4,
            top_groups=2,
            selection_bias=True,
            balance_rate=0.02,  # of few steps
        ),
        vocab_size=320,
        max_seq_len=2048,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )


def deepseek_v3_16b() -> DeepSeekV3Config:
    """15,706,484,224 parameters, 2.7B of them active: the shape of DeepSeek-V2-Lite, which torchtitan trains under the
    name DeepSeek-V3 16B, with selection biases."""
    return DeepSeekV3Config(
        dim=2048,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        ffn_dim=10_944,
        moe=MoEConfig(
            n_experts=64, top_k=6, ffn_dim=1408, n_shared=2, scoring="softmax", normalize=False, selection_bias=True
        ),
        vocab_size=102_400,
        max_seq_len=163_840,
        q_lora_rank=None,
        rope_scaling=YarnScaling(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
    )


def deepseek_v3_671b() -> DeepSeekV3Config:
    """DeepSeek-V3: 671,026,404,352 parameters, 37B of them active."""
    return DeepSeekV3Config(
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        ffn_dim=18_432,
        moe=MoEConfig(
            n_experts=256,
            top_k=8,
            ffn_dim=2048,
            n_shared=1,
            scoring="sigmoid",
            scale=2.5,
            n_groups=8,
            top_groups=4,
            selection_bias=True,
        ),
        vocab_size=129_280,
        max_seq_len=163_840,
        rope_scaling=YarnScaling(factor=40.0),
    )


# Their key -> our field, where the value is the same.
_SAME = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PLAIN = {"first_k_dense_replace": "n_dense_layers", "intermediate_size": "ffn_dim"} | {name: name for name in _SAME}
_PLAIN_MOE = {
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_dim",
    "n_shared_experts": "n_shared",
    "routed_scaling_factor": "scale",
}
_RENAMED = {
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "router": "gate",
    "expert_bias": "e_score_correction_bias",
    "shared": "shared_experts",
}


def _needed(raw: dict[str, Any]) -> dict[str, Any]:
    second = raw.get("model_type") == "deepseek_v2"
    kind, scoring = ("deepseek_v2", "softmax") if second else ("deepseek_v3", "sigmoid")
    return {"model_type": kind, "moe_layer_freq": 1, "scoring_func": scoring, "rope_interleave": True}


def _from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    second = raw["model_type"] == "deepseek_v2"
    grouped = not second or raw.get("topk_method", "greedy") != "greedy"
    moe = MoEConfig(
        **{field: raw[key] for key, field in _PLAIN_MOE.items()},
        scoring="softmax" if second else "sigmoid",
        normalize=not second and raw["norm_topk_prob"],
        n_groups=raw["n_group"] if grouped else 1,
        top_groups=raw["topk_group"] if grouped else 1,
        selection_bias=not second,
    )
    return {"moe": moe, **rope_from_hf(raw, "yarn", partial(yarn_from_hf, scales_scores=True))}


def _to_hf(config: DeepSeekV3Config) -> dict[str, Any]:
    moe = config.moe
    second = moe.scoring == "softmax"
    if moe.selection_bias == second or (second and moe.normalize) or not moe.n_shared:
        raise ValueError(
            f"Hugging Face has no form for scoring={moe.scoring!r} with selection_bias={moe.selection_bias}, "
            f"normalize={moe.normalize} and n_shared={moe.n_shared}: DeepSeek-V3 is 'sigmoid' with selection_bias, "
            "DeepSeek-V2 'softmax' without it and without normalize, both with shared experts; use one of these"
        )
    kind = "deepseek_v2" if second else "deepseek_v3"
    return {
        "architectures": [f"Deepseek{kind[-2:].upper()}ForCausalLM"],
        "model_type": kind,
        **{key: getattr(moe, field) for key, field in _PLAIN_MOE.items()},
        "n_group": moe.n_groups,
        "topk_group": moe.top_groups,
        "topk_method": ("group_limited_greedy" if moe.n_groups > 1 else "greedy") if second else "noaux_tc",
        "scoring_func": moe.scoring,
        "norm_topk_prob": moe.normalize,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": config.n_heads,
        "rope_interleave": True,
        "rope_scaling": yarn_to_hf(config.rope_scaling, scales_scores=True),
    }


def tp_plan(config: DeepSeekV3Config) -> dict[str, str]:
    """Module -> style. Where queries are compressed, what is gathered over the sequence is the latents, a third of the
    residual stream's width; else the normalized residual stream."""
    compressed = config.q_lora_rank is not None
    dense = {f"layers.{i}.{path}": how for i in range(config.n_dense_layers) for path, how in SWIGLU_PLAN.items()}
    shared = {f"layers.*.mlp.shared.{part}_proj": "sequence" for part in ("gate", "up", "down")}
    return {
        **PLAN,
        "layers.*.attn_norm": "sequence" if compressed else "sequence_gather",
        "layers.*.attn.q_a_proj": "sequence_gather",
        "layers.*.attn.q_a_norm": "sequence",
        "layers.*.attn.q_b_proj": "columns",
        "layers.*.attn.kv_a_proj": "sequence_gather" if compressed else "sequence",
        "layers.*.attn.kv_a_norm": "sequence",
        "layers.*.attn.kv_b_proj": "columns",
        **dense,
        "layers.*.mlp_norm": "sequence",
        **EXPERTS_PLAN,
        **(shared if config.moe.n_shared else {}),
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    DeepSeekV3Config,
    DeepSeekV3,
    tp_plan,
    ("n_heads", "ffn_dim", "vocab_size"),
    longest=lambda config: config.max_seq_len,
    hugging_face=decoder_format(
        "DeepSeek-V3",
        DeepSeekV3Config,
        *("deepseek_v3", "deepseek_v2"),
        plain=_PLAIN,
        renamed=_RENAMED,
        needed=_needed,
        read=_from_hf,
        write=_to_hf,
        free=FREE,
    ),
)

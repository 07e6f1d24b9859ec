"""DeepSeek-V3 as a `Family`."""

import os
from functools import partial
from typing import Any

import torch

from stepgraph.models.deepseek_v3.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.hf_files import PLAIN, names, read_config, require, to_hf
from stepgraph.models.moe import hf as moe_hf
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.plan import EXPERTS

_TITLE = "DeepSeek-V3"

# Their key -> our field, where the value is the same.
_PLAIN = PLAIN | {
    "first_k_dense_replace": "n_dense_layers",
    "intermediate_size": "ffn_dim",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_PLAIN_MOE = {
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_dim",
    "n_shared_experts": "n_shared",
    "routed_scaling_factor": "scale",
}


#: Hugging Face's name for our tensor, such as ``layers.7.attn.kv_a_norm.weight``.
hf_name = names(
    {
        "q_a_norm": "q_a_layernorm",
        "kv_a_proj": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "router": "gate",
        "expert_bias": "e_score_correction_bias",
        "shared": "shared_experts",
    }
)
#: See `stepgraph.models.moe.hf.pieces`.
pieces = partial(moe_hf.pieces, hf_name)


def config_from_hf(folder: str | os.PathLike[str]) -> DeepSeekV3Config:
    """The configuration that ``folder/config.json`` describes.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that `DeepSeekV3` is not.
    """
    with read_config(folder, _TITLE) as (path, raw):
        second = raw.get("model_type") == "deepseek_v2"
        needed = {
            "model_type": "deepseek_v2" if second else "deepseek_v3",
            "hidden_act": "silu",
            "attention_bias": False,
        }
        needed |= {"moe_layer_freq": 1, "scoring_func": "softmax" if second else "sigmoid", "rope_interleave": True}
        require(raw, path, _TITLE, needed)
        grouped = not second or raw.get("topk_method", "greedy") != "greedy"
        moe = MoEConfig(
            **{field: raw[key] for key, field in _PLAIN_MOE.items()},
            scoring="softmax" if second else "sigmoid",
            normalize=not second and raw["norm_topk_prob"],
            n_groups=raw["n_group"] if grouped else 1,
            top_groups=raw["topk_group"] if grouped else 1,
            selection_bias=not second,
        )
        return DeepSeekV3Config(
            **{field: raw[key] for key, field in _PLAIN.items()},
            moe=moe,
            tie_embeddings=raw.get("tie_word_embeddings", False),
            **moe_hf.rope_from_hf(raw, scales_scores=True),
        )


def config_to_hf(config: DeepSeekV3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``config``, in the keys that transformers 4 and 5 both read.

    Raises ``ValueError`` for a model that neither DeepSeek-V3's format nor DeepSeek-V2's can express.
    """
    moe = config.moe
    second = moe.scoring == "softmax"
    if moe.selection_bias == second or (second and moe.normalize) or not moe.n_shared:
        raise ValueError(
            f"Hugging Face has no form for scoring={moe.scoring!r} with selection_bias={moe.selection_bias}, "
            f"normalize={moe.normalize} and n_shared={moe.n_shared}: DeepSeek-V3 is 'sigmoid' with selection_bias, "
            "DeepSeek-V2 'softmax' without it and without normalize, both with shared experts; give one of these"
        )
    kind = "deepseek_v2" if second else "deepseek_v3"
    return to_hf(config, _PLAIN, dtype) | {
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
        "rope_scaling": moe_hf.yarn_to_hf(config.rope_scaling, scales_scores=True),
    }


#: Fields of the configuration that the number of tensor-parallel ranks must divide.
TP_SIZES = ("n_heads", "ffn_dim", "vocab_size")


def tp_plan(config: DeepSeekV3Config) -> dict[str, str]:
    """Module -> style. Where queries are compressed, what is gathered over the sequence is the latents, a third of the
    residual stream's width; else the normalized residual stream."""
    compressed = config.q_lora_rank is not None
    dense = {f"layers.{i}.mlp_norm": "sequence_gather" for i in range(config.n_dense_layers)}
    for i in range(config.n_dense_layers):
        dense |= {f"layers.{i}.mlp.gate_proj": "columns", f"layers.{i}.mlp.up_proj": "columns"}
        dense |= {f"layers.{i}.mlp.down_proj": "rows"}
    shared = {f"layers.*.mlp.shared.{part}_proj": "sequence" for part in ("gate", "up", "down")}
    return {
        "embed": "embedding",
        "layers.*.attn_norm": "sequence" if compressed else "sequence_gather",
        "layers.*.attn.q_proj": "columns",
        "layers.*.attn.q_a_proj": "sequence_gather",
        "layers.*.attn.q_a_norm": "sequence",
        "layers.*.attn.q_b_proj": "columns",
        "layers.*.attn.kv_a_proj": "sequence_gather" if compressed else "sequence",
        "layers.*.attn.kv_a_norm": "sequence",
        "layers.*.attn.kv_b_proj": "columns",
        "layers.*.attn.o_proj": "rows",
        **dense,
        "layers.*.mlp_norm": "sequence",
        **EXPERTS,
        **(shared if config.moe.n_shared else {}),
        "norm": "sequence_gather",
        "head": "columns",
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    DeepSeekV3Config,
    DeepSeekV3,
    tp_plan,
    TP_SIZES,
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace(
        "DeepSeek-V3",
        hf_name,
        config_from_hf,
        config_to_hf,
        ("deepseek_v3", "deepseek_v2"),
        free=("max_seq_len", "moe.balance_rate", "moe.balance_loss"),
        pieces=pieces,
    ),
)

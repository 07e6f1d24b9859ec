"""Qwen3-MoE as a `Family`."""

import os
from functools import partial
from typing import Any

import torch

from stepgraph.models.decoder import PLAN
from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.hf_files import PLAIN, names, read_config, require, to_hf
from stepgraph.models.moe import hf as moe_hf
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.moe.plan import EXPERTS
from stepgraph.models.qwen3_moe.qwen3_moe import Qwen3MoE, Qwen3MoEConfig

_TITLE = "Qwen3-MoE"

# Their key -> our field, where the value is the same.
_PLAIN = PLAIN | {"num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}
_PLAIN_MOE = {
    "num_experts": "n_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_dim",
    "norm_topk_prob": "normalize",
}


#: Hugging Face's name for our tensor, such as ``layers.7.attn.q_norm.weight``.
hf_name = names({"router": "gate"})
#: See `stepgraph.models.moe.hf.pieces`.
pieces = partial(moe_hf.pieces, hf_name)


def config_from_hf(folder: str | os.PathLike[str]) -> Qwen3MoEConfig:
    """The configuration that ``folder/config.json`` describes.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that `Qwen3MoE` is not.
    """
    with read_config(folder, _TITLE) as (path, raw):
        needed = {"model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
        require(raw, path, _TITLE, needed | {"decoder_sparse_step": 1, "mlp_only_layers": []})
        if "num_local_experts" in raw:  # transformers 5's name of it
            raw = {"num_experts": raw["num_local_experts"]} | raw
        moe = MoEConfig(**{field: raw[key] for key, field in _PLAIN_MOE.items()})
        plain = {field: raw[key] for key, field in _PLAIN.items()}
        rope = moe_hf.rope_from_hf(raw, scales_scores=False)
        return Qwen3MoEConfig(**plain, moe=moe, tie_embeddings=raw.get("tie_word_embeddings", False), **rope)


def config_to_hf(config: Qwen3MoEConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``config``, in the keys that transformers 4 and 5 both read.

    Raises ``ValueError`` for experts that Qwen3-MoE does not have.
    """
    moe = config.moe
    balance = {"balance_rate": moe.balance_rate, "balance_loss": moe.balance_loss}
    if moe != MoEConfig(moe.n_experts, moe.top_k, moe.ffn_dim, normalize=moe.normalize, **balance):
        raise ValueError(
            f"Hugging Face's Qwen3-MoE has no form for {moe}: its router has softmax scores without groups, scale and "
            "selection_bias, and no shared experts; drop them"
        )
    return to_hf(config, _PLAIN, dtype) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{key: getattr(moe, field) for key, field in _PLAIN_MOE.items()},
        "intermediate_size": moe.top_k * moe.ffn_dim,  # of dense blocks, of which there are none
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "rope_scaling": moe_hf.yarn_to_hf(config.rope_scaling, scales_scores=False),
    }


#: The tensor-parallel plan: module -> style.
TP_PLAN = PLAN | EXPERTS | {"layers.*.attn.[qk]_norm": "sequence", "layers.*.mlp_norm": "sequence"}

QWEN3_MOE = Family(
    "qwen3_moe",
    Qwen3MoEConfig,
    Qwen3MoE,
    lambda config: TP_PLAN,
    ("n_heads", "n_kv_heads", "vocab_size"),
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace(
        "Qwen3-MoE",
        hf_name,
        config_from_hf,
        config_to_hf,
        ("qwen3_moe",),
        free=("max_seq_len", "moe.balance_rate", "moe.balance_loss"),
        pieces=pieces,
    ),
)

"""Names of the tensors, and ``config.json``, of a Hugging Face Qwen3-MoE checkpoint."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepgraph.models.family import Piece
from stepgraph.models.hf_files import CONFIG, read_json, require
from stepgraph.models.moe import hf as moe_hf
from stepgraph.models.moe.config import MoEConfig
from stepgraph.models.qwen3_moe.qwen3_moe import Qwen3MoEConfig

_TITLE = "Qwen3-MoE"

# Ours -> Hugging Face's, part by part of a path.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "router": "gate",
}
# Their key -> our field, where the value is the same.
_PLAIN = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
_PLAIN_MOE = {
    "num_experts": "n_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "ffn_dim",
    "norm_topk_prob": "normalize",
}


def hf_name(name: str) -> str:
    """Hugging Face's name for our tensor, such as ``layers.7.attn.q_norm.weight``."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(["model", "layers", *(_INNER.get(part, part) for part in parts[1:])])
    return ".".join([_OUTER[parts[0]], *parts[1:]])


def pieces(name: str, shape: Sequence[int]) -> list[Piece]:
    """See `stepgraph.models.moe.hf.pieces`."""
    return moe_hf.pieces(hf_name, name, shape)


def config_from_hf(folder: str | os.PathLike[str]) -> Qwen3MoEConfig:
    """The configuration that ``folder/config.json`` describes.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that `Qwen3MoE` is not.
    """
    path = Path(folder) / CONFIG
    raw = read_json(path)
    needed = {"model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    require(raw, path, _TITLE, needed | {"decoder_sparse_step": 1, "mlp_only_layers": []})
    if "num_local_experts" in raw:  # transformers 5's name of it
        raw = {"num_experts": raw["num_local_experts"]} | raw
    try:
        moe = MoEConfig(**{field: raw[key] for key, field in _PLAIN_MOE.items()})
        plain = {field: raw[key] for key, field in _PLAIN.items()}
        rope = moe_hf.rope_from_hf(raw, scales_scores=False)
        return Qwen3MoEConfig(**plain, moe=moe, tie_embeddings=raw.get("tie_word_embeddings", False), **rope)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; give the config.json of a {_TITLE} checkpoint") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


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
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{key: getattr(config, field) for key, field in _PLAIN.items()},
        **{key: getattr(moe, field) for key, field in _PLAIN_MOE.items()},
        "intermediate_size": moe.top_k * moe.ffn_dim,  # of dense blocks, of which there are none
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": moe_hf.yarn_to_hf(config.rope_scaling, scales_scores=False),
        "tie_word_embeddings": config.tie_embeddings,
        # The tokenizer defines which ids begin and end a text.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }

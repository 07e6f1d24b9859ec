"""Names of the tensors, and ``config.json``, of a Hugging Face Llama 3 checkpoint."""

import os
from pathlib import Path
from typing import Any

import torch

from stepgraph.models.hf_files import CONFIG, read_json, require, rope_settings
from stepgraph.models.llama3.llama3 import Llama3Config
from stepgraph.models.rope import RopeScaling

# Ours -> Hugging Face's. Inside a block, "layers.7.attn" becomes "model.layers.7.self_attn", and so on.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def hf_name(name: str) -> str:
    """Hugging Face's name for our parameter, such as ``layers.7.attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(["model", "layers", parts[1], _BLOCK[parts[2]], *parts[3:]])
    return ".".join([_OUTER[parts[0]], *parts[1:]])


def config_from_hf(folder: str | os.PathLike[str]) -> Llama3Config:
    """The configuration that ``folder/config.json`` describes; ``attention`` is left at its default.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that :class:`Llama3` is not.
    """
    path = Path(folder) / CONFIG
    raw = read_json(path)
    needed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    require(raw, path, "Llama 3", needed)
    try:
        config = Llama3Config(
            dim=raw["hidden_size"],
            n_layers=raw["num_hidden_layers"],
            n_heads=raw["num_attention_heads"],
            n_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            ffn_dim=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            max_seq_len=raw["max_position_embeddings"],
            norm_eps=raw["rms_norm_eps"],
            tie_embeddings=raw.get("tie_word_embeddings", False),
            **_rope_from_hf(raw),
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; give the config.json of a Llama 3 checkpoint") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if raw.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"{path}: head_dim={raw['head_dim']} is not hidden_size / num_attention_heads = {config.head_dim}; "
            "give a Llama 3 checkpoint"
        )
    return config


def config_to_hf(config: Llama3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``config``, in the keys that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": config.tie_embeddings,
        # The tokenizer defines which ids begin and end a text; the defaults would be Llama 2's.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _rope_from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``."""
    theta, kind, rope = rope_settings(raw)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; give a checkpoint with 'default' or 'llama3'")
    scaling = RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope["original_max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope_scaling": scaling}

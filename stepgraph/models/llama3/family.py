"""Llama 3 as a `Family`."""

import os
from typing import Any

import torch

from stepgraph.models.family import Family, HuggingFace
from stepgraph.models.hf_files import PLAIN, names, read_config, require, rope_settings, to_hf
from stepgraph.models.llama3.llama3 import TP_PLAN, TP_SIZES, Llama3, Llama3Config
from stepgraph.models.rope import RopeScaling

_TITLE = "Llama 3"
_PLAIN = PLAIN | {"intermediate_size": "ffn_dim"}
_ROPE = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_ROPE |= {"original_max_position_embeddings": "original_max_seq_len"}

#: Hugging Face's name for our parameter, such as ``layers.7.attn.q_proj.weight``.
hf_name = names({})


def config_from_hf(folder: str | os.PathLike[str]) -> Llama3Config:
    """The configuration that ``folder/config.json`` describes.

    Raises ``ValueError`` where the file is missing or unreadable, or describes a model that :class:`Llama3` is not.
    """
    with read_config(folder, _TITLE) as (path, raw):
        needed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        require(raw, path, _TITLE, needed)
        config = Llama3Config(
            **{field: raw[key] for key, field in _PLAIN.items()},
            n_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            tie_embeddings=raw.get("tie_word_embeddings", False),
            **_rope_from_hf(raw),
        )
        if raw.get("head_dim") not in (None, config.head_dim):
            raise ValueError(
                f"head_dim={raw['head_dim']} is not hidden_size / num_attention_heads = {config.head_dim}; "
                "give a Llama 3 checkpoint"
            )
        return config


def config_to_hf(config: Llama3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of ``config``, in the keys that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    return to_hf(config, _PLAIN, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "mlp_bias": False,
        "rope_scaling": scaling and {"rope_type": "llama3", **{key: getattr(scaling, f) for key, f in _ROPE.items()}},
    }


def _rope_from_hf(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``."""
    theta, kind, rope = rope_settings(raw)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; give a checkpoint with 'default' or 'llama3'")
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**{field: rope[key] for key, field in _ROPE.items()})}


LLAMA3 = Family(
    "llama3",
    Llama3Config,
    Llama3,
    lambda config: TP_PLAN,
    TP_SIZES,
    longest=lambda config: config.max_seq_len,
    hugging_face=HuggingFace("Llama 3", hf_name, config_from_hf, config_to_hf, ("llama",), free=("max_seq_len",)),
)

"""Language models as plain ``nn.Module``s that know nothing of graphs or meshes, and the list of their families."""

import os
from pathlib import Path
from typing import Any

from stepgraph.errors import unknown_name
from stepgraph.models.deepseek_v3 import (
    DEEPSEEK_V3,
    DeepSeekV3,
    DeepSeekV3Config,
    deepseek_v3_16b,
    deepseek_v3_671b,
    deepseek_v3_debug,
)
from stepgraph.models.family import Family, HuggingFace, Piece, flops_per_token, num_params
from stepgraph.models.golf import GOLF, Golf, GolfConfig, golf
from stepgraph.models.hf_decoder import CONFIG, read_json
from stepgraph.models.llama3 import (
    LLAMA3,
    Llama3,
    Llama3Config,
    llama3_1b,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama3_debug,
)
from stepgraph.models.loss import added_losses, next_token_loss
from stepgraph.models.moe import MoEConfig
from stepgraph.models.qwen3_moe import QWEN3_MOE, Qwen3MoE, Qwen3MoEConfig, qwen3_30b_a3b
from stepgraph.models.rope import RopeScaling, YarnScaling
from stepgraph.models.transformers import TRANSFORMERS

FAMILIES: list[Family] = [LLAMA3, GOLF, DEEPSEEK_V3, QWEN3_MOE, TRANSFORMERS]


def family_of(config: Any) -> Family:
    """The family of a model's configuration. Raises ``ValueError`` for any other object."""
    for family in FAMILIES:
        if type(config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES)
    raise ValueError(f"{type(config).__name__} is not the configuration of a model: use one of {known}")


def family_named(name: str) -> Family:
    """The family called ``name``; an unknown one is refused with the nearest."""
    families = {family.name: family for family in FAMILIES}
    if name not in families:
        raise unknown_name("model family", name, families)
    return families[name]


def config_from_hf(folder: str | os.PathLike[str], own: bool = True) -> Any:
    """The configuration of the model in ``folder``, a Hugging Face checkpoint, by the family that its ``config.json``
    names; for another one, and for all if not ``own``, transformers' module. ``ValueError`` where there is none."""
    if (adapter := Path(folder) / "adapter_config.json").exists():
        base = read_json(adapter).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds an adapter ({adapter.name}) of {base}, not a whole model: use that one, "
            "or merge the adapter into it by merge_and_unload() of peft"
        )
    path = Path(folder) / CONFIG
    found = read_json(path).get("model_type")
    formats = {kind: f.hugging_face for f in FAMILIES if f.hugging_face for kind in f.hugging_face.model_types}
    return (formats[found] if own and found in formats else TRANSFORMERS.hugging_face).read_config(folder)

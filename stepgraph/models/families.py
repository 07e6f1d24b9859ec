"""All families of models. A new one is imported here and put into the list."""

import os
from pathlib import Path
from typing import Any

from stepgraph.errors import unknown_name
from stepgraph.models.deepseek_v3 import DEEPSEEK_V3
from stepgraph.models.family import Family
from stepgraph.models.golf import GOLF
from stepgraph.models.hf_files import CONFIG, read_json
from stepgraph.models.llama3 import LLAMA3
from stepgraph.models.qwen3_moe import QWEN3_MOE
from stepgraph.models.transformers import TRANSFORMERS

FAMILIES: list[Family] = [LLAMA3, GOLF, DEEPSEEK_V3, QWEN3_MOE, TRANSFORMERS]


def family_of(config: Any) -> Family:
    """The family of a model's configuration. Raises ``ValueError`` for what is none."""
    for family in FAMILIES:
        if type(config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES)
    raise ValueError(f"{type(config).__name__} is not the configuration of a model: give one of {known}")


def family_named(name: str) -> Family:
    """The family called ``name``; an unknown one is refused with the nearest."""
    families = {family.name: family for family in FAMILIES}
    if name not in families:
        raise unknown_name("model family", name, families)
    return families[name]


def config_from_hf(folder: str | os.PathLike[str], own: bool = True) -> Any:
    """The configuration of the model in ``folder``, a Hugging Face checkpoint, by the family that its ``config.json``
    names; of another one, and of all if not ``own``, as transformers has it. ``ValueError`` where there is none."""
    if (adapter := Path(folder) / "adapter_config.json").exists():
        base = read_json(adapter).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds an adapter ({adapter.name}) of {base}, not a whole model: give that one, "
            "or merge the adapter into it by merge_and_unload() of peft"
        )
    path = Path(folder) / CONFIG
    found = read_json(path).get("model_type")
    formats = {kind: f.hugging_face for f in FAMILIES if f.hugging_face for kind in f.hugging_face.model_types}
    return (formats[found] if own and found in formats else TRANSFORMERS.hugging_face).read_config(folder)

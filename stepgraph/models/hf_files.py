"""The JSON files of a Hugging Face checkpoint, and what all families read from ``config.json``."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stepgraph import errors
from stepgraph.errors import require_file

CONFIG = "config.json"

# Ours -> Hugging Face's, part by part of a path, in every family.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INNER = {"attn_norm": "input_layernorm", "attn": "self_attn", "mlp_norm": "post_attention_layernorm"}
#: Their key -> our field, where the value is the same, in every family.
PLAIN = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}


def names(inner: Mapping[str, str]) -> Callable[[str], str]:
    """Our name of a tensor, such as ``layers.7.attn.q_proj.weight``, -> Hugging Face's. ``inner``: a family's own parts
    of a path inside a block."""
    inside = _INNER | dict(inner)

    def hf_name(name: str) -> str:
        parts = name.split(".")
        if parts[0] == "layers":
            return ".".join(["model", "layers", *(inside.get(part, part) for part in parts[1:])])
        return ".".join([_OUTER[parts[0]], *parts[1:]])

    return hf_name


@contextlib.contextmanager
def read_config(folder: str | os.PathLike[str], title: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The path and the values of ``folder/config.json``. ``ValueError``, one line, where it is missing or unreadable,
    and for what is missing in it, or wrong, inside."""
    path = Path(folder) / CONFIG
    raw = read_json(path)
    try:
        yield path, raw
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; give the config.json of a {title} checkpoint") from None
    except (TypeError, ValueError) as error:
        told = str(error)
        raise ValueError(told if told.startswith(str(path)) else f"{path}: {told}") from None


def to_hf(config: Any, plain: Mapping[str, str], dtype: torch.dtype) -> dict[str, Any]:
    """What every family writes into ``config.json``, in the keys that transformers 4 and 5 both read."""
    return {
        **{key: getattr(config, field) for key, field in plain.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        # The tokenizer defines which ids begin and end a text; the defaults would be another model's.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ``ValueError`` where the file is missing or holds none."""
    if not path.exists():
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face checkpoint")
    require_file(path)
    try:
        value = errors.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    return value


def downloaded(name: str) -> str:
    """``name``, a folder; or where the model of that name on the Hub is downloaded to, if it is none."""
    if Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return name
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"])
    except Exception as error:  # of the network, of the Hub, of a missing package
        raise ValueError(
            f"init_from_hf={name} is not a folder, and the Hub does not give it ({errors.first_line(error)})"
        ) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file aside and give it its name when it is whole."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def require(raw: dict[str, Any], path: Path, title: str, needed: dict[str, Any]) -> None:
    """``ValueError`` unless each key of a ``config.json`` has the value needed, or is left out; ``model_type`` must be
    there. No dropout either, which the models here do not have: they would train as another model, silently."""
    for key, value in needed.items():
        if raw.get(key, value) != value or (key == "model_type" and key not in raw):
            raise ValueError(f"{path}: {key} is {raw.get(key)!r}, {title} has {value!r}; give a {title} checkpoint")
    for key, value in raw.items():
        if key.endswith("_dropout") and key != "classifier_dropout" and value:
            raise ValueError(f"{path}: {key} is {value!r}, {title} trains without dropout here; set it to 0.0")


def rope_settings(raw: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """(theta, kind, all settings) of the RoPE: in one table from transformers 5 on, two keys before. Where there are
    both, as transformers reads them. Raises ``ValueError`` for a table that is none."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(table, dict):
        raise ValueError(f"the settings of its RoPE are {table!r}, not a JSON object")
    rope = {"rope_theta": raw.get("rope_theta")} | table
    theta = rope.get("rope_theta") or 10_000.0  # the default of transformers' configurations
    return theta, rope.get("rope_type", rope.get("type", "default")), rope

"""Hugging Face's format: the JSON files of a checkpoint, checkpoints of the Hub, and for the decoders here the names of
tensors and ``config.json`` in both directions."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stepgraph import errors
from stepgraph.errors import require_file
from stepgraph.models.family import HuggingFace
from stepgraph.models.rope import YarnScaling

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ``ValueError`` where the file is missing or holds none."""
    if not path.exists():
        raise ValueError(f"{path} is missing; use the folder of a Hugging Face checkpoint")
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
            f"init_from_hf={name} is not a folder, and its download from the Hub failed ({errors.first_line(error)}): "
            "check the name, or use a folder"
        ) from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file by one that holds ``value``."""
    errors.write_text(path, json.dumps(value, indent=2) + "\n")


# Ours -> Hugging Face's, part by part of a path.
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INNER = {"attn_norm": "input_layernorm", "attn": "self_attn", "mlp_norm": "post_attention_layernorm"}
# Their key -> our field, where the value is the same.
_PLAIN = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_SCORES_AS_THEY_ARE = {"mscale": 1.0, "mscale_all_dim": 0.0}  # what transformers does without the two


def decoder_format(
    title: str,
    config: type,
    *model_types: str,
    plain: Mapping[str, str],
    renamed: Mapping[str, str],
    needed: Callable[[dict[str, Any]], dict[str, Any]],
    read: Callable[[dict[str, Any]], dict[str, Any]],
    write: Callable[[Any], dict[str, Any]],
    check: Callable[[dict[str, Any], Any], None] = lambda raw, config: None,
    free: tuple[str, ...] = ("max_seq_len",),
) -> HuggingFace:
    """The format of a `Decoder` with shapes ``config``; the others are as in `HuggingFace`.

    ``plain``: their key -> our field where the value is the same, besides those of all decoders. ``renamed``: parts of
    a path inside a block that have another name there. ``needed(raw)``: the values that keys of a ``config.json`` must
    have or leave out. ``read(raw)``: the other fields of ours; raises ``ValueError`` and ``KeyError`` for another
    model. ``write(config)``: the other keys of theirs; raises ``ValueError`` for what the format cannot express.
    ``check(raw, config)``: raises ``ValueError`` where ours is not theirs after all.
    """
    same, inside = _PLAIN | dict(plain), _INNER | dict(renamed)

    def name(ours: str) -> str:
        parts = ours.split(".")
        if parts[0] == "layers":
            return ".".join(["model", "layers", *(inside.get(part, part) for part in parts[1:])])
        return ".".join([_OUTER[parts[0]], *parts[1:]])

    def read_config(folder: str | os.PathLike[str]) -> Any:
        path = Path(folder) / CONFIG
        raw = read_json(path)
        try:
            _require(raw, title, {"hidden_act": "silu", "attention_bias": False} | needed(raw))
            tied = raw.get("tie_word_embeddings", False)
            made = config(**{field: raw[key] for key, field in same.items()}, tie_embeddings=tied, **read(raw))
            check(raw, made)
            return made
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}; use the config.json of a {title} checkpoint") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def write_config(shape: Any, dtype: torch.dtype) -> dict[str, Any]:
        return {  # in the keys that transformers 4 and 5 both read
            **{key: getattr(shape, field) for key, field in same.items()},
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": shape.tie_embeddings,
            # The tokenizer defines which ids begin and end a text; the defaults would be another model's.
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        } | write(shape)

    return HuggingFace(title, name, read_config, write_config, model_types, free)


def _require(raw: dict[str, Any], title: str, needed: dict[str, Any]) -> None:
    """``ValueError`` unless each key of a ``config.json`` has the value needed, or is left out; ``model_type`` must be
    there. No dropout either, which the models here do not have: they would train as another model, silently."""
    for key, value in needed.items():
        if raw.get(key, value) != value or (key == "model_type" and key not in raw):
            raise ValueError(f"{key} is {raw.get(key)!r}, {title} has {value!r}; use a {title} checkpoint")
    for key, value in raw.items():
        if key.endswith("_dropout") and key != "classifier_dropout" and value:
            raise ValueError(f"{key} is {value!r}, {title} trains without dropout here; set it to 0.0")


def rope_from_hf(raw: dict[str, Any], kind: str, scaling: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` where it is of ``kind``, by ``scaling`` of its settings: in one table from
    transformers 5 on, two keys before. Where there are both, as transformers reads them. Raises ``ValueError`` for a
    table that is none, and for another kind."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(table, dict):
        raise ValueError(f"the settings of its RoPE are {table!r}, not a JSON object")
    rope = {"rope_theta": raw.get("rope_theta")} | table
    theta = {"rope_theta": rope.get("rope_theta") or 10_000.0}  # the default of transformers' configurations
    found = rope.get("rope_type", rope.get("type", "default"))
    if found == "default":
        return theta
    if found != kind:
        raise ValueError(f"rope_type {found!r} is not supported; use a checkpoint with 'default' or {kind!r}")
    return theta | {"rope_scaling": scaling(rope)}


def yarn_from_hf(rope: dict[str, Any], scales_scores: bool) -> YarnScaling:
    """YaRN as transformers reads it from the settings of a RoPE.

    ``scales_scores``: whether the model's attention scales scores by ``mscale_all_dim``. Raises ``ValueError`` for what
    `YarnScaling` cannot express, ``KeyError`` for a key that is missing.
    """
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    both = bool(mscale and mscale_all_dim)  # their tables use both or neither
    untold = both if not scales_scores else mscale_all_dim and not mscale
    for key in [key for key in ("attention_factor", "truncate") if rope.get(key) is not None]:
        raise ValueError(f"YaRN with {key}={rope[key]} is not supported; use a checkpoint without {key}")
    if untold:
        raise ValueError(
            f"YaRN with mscale={mscale} and mscale_all_dim={mscale_all_dim} is not supported; use a checkpoint with "
            + ("both or neither" if scales_scores else "neither")
        )
    given = {field: rope[key] for key, field in _YARN.items() if rope.get(key) is not None}
    needed = {_YARN[key]: rope[key] for key in ("factor", "original_max_position_embeddings")}
    return YarnScaling(**given | needed | ({} if both else _SCORES_AS_THEY_ARE))


def yarn_to_hf(yarn: YarnScaling | None, scales_scores: bool) -> dict[str, Any] | None:
    """``rope_scaling`` of a ``config.json``. ``ValueError`` for settings that transformers' model does not have."""
    if yarn is None:
        return None
    values = {key: getattr(yarn, field) for key, field in _YARN.items()}
    if all(values[key] == value for key, value in _SCORES_AS_THEY_ARE.items()):
        values = {key: value for key, value in values.items() if key not in _SCORES_AS_THEY_ARE}
    elif not scales_scores or not yarn.mscale_all_dim:
        raise ValueError(
            f"Hugging Face has no form for {yarn}: use mscale=1 with mscale_all_dim=0"
            + (", or mscale_all_dim above 0" if scales_scores else "")
        )
    return {"type": "yarn", "rope_type": "yarn", **values}

"""The JSON files of a Hugging Face checkpoint, and what all families read from ``config.json`` alike."""

import json
from pathlib import Path
from typing import Any

from stepgraph import errors
from stepgraph.errors import require_file

CONFIG = "config.json"


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

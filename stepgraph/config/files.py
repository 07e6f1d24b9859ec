"""``--config FILE``: the options of a run from a file, a TOML file of some or the config.json of a run."""

import json
import tomllib
from pathlib import Path
from typing import Any

from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.errors import unknown_name


def read_config(path: Path, preset: str) -> TrainConfig:
    """The options in ``path``, on top of those of the preset that it names, else of ``preset``.

    A TOML file has options by their names, the model's in a table ``[model]``, and a ``preset``. A run's config.json
    has all of them, of which the run's folder is left out.

    Raises:
        ValueError: one line; a file that cannot be read, an unknown option or preset, a bad value.
    """
    values = _parsed(path)
    try:
        name = values.pop("preset", preset)
        if name not in (*PRESETS, "custom"):
            raise unknown_name("preset", name, PRESETS)
        base = json.loads((TrainConfig() if name == "custom" else PRESETS[name]()).to_json())
        model = values.pop("model", {})
        if not isinstance(model, dict):
            raise ValueError(f"model={model!r} must be a table")
        if model.get("family", base["model"]["family"]) == base["model"]["family"]:
            model = base["model"] | _underscored(model)
        return TrainConfig.from_json(json.dumps(base | _underscored(values) | {"model": model}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--config {path}: {error}") from error


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read --config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path} is not UTF-8: save it as UTF-8") from error
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"--config {path} must be FILE.toml, or the config.json of a run")
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold an object with the options of a run")
    if path.suffix == ".json":
        values |= {"out": None, "resume": None}
    return values


def _underscored(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}

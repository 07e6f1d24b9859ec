"""``--config FILE``: options of a run from a TOML file, or from another run's config.json."""

import json
import tomllib
from pathlib import Path
from typing import Any

from stepgraph.config.command_line import run_of
from stepgraph.config.presets import DEFAULT, PRESETS, fine_tuning
from stepgraph.config.train import TrainConfig
from stepgraph.errors import read_json, require_file, unknown_name


def read_config(path: Path, preset: str | None, init_from_hf: str | None = None) -> tuple[TrainConfig, set[str]]:
    """The options of a run with those in ``path`` applied, and the names of the options that ``path`` sets. The base is
    the preset that the file names, else ``preset``; without either, and with ``init_from_hf`` on the command line or in
    the file, it is the default for fine-tuning that folder.

    A TOML file sets options by name, the model's in a table ``[model]``, and may set ``preset``. A run's config.json
    has every option but the run's folder; the options that differ from its preset count as set. Raises ``ValueError``:
    one line; a file that cannot be read, an unknown option or preset, a bad value.
    """
    values = _parsed(path)
    try:
        values = _underscored(values)
        folder = init_from_hf or values.get("init_from_hf")
        tunes = not (preset or "preset" in values) and folder and isinstance(folder, str) and Path(folder).is_dir()
        name = values.pop("preset", preset or DEFAULT)
        if not isinstance(name, str):
            raise ValueError(f"preset={name!r} must be a name in quotes")
        if name not in (*PRESETS, "custom"):
            raise unknown_name("preset", name, PRESETS)
        default = (
            fine_tuning(Path(folder), lora="lora" in values, dpo=values.get("loss") == "dpo")
            if tunes
            else TrainConfig()
            if name == "custom"
            else PRESETS[name]()
        )
        base = json.loads(default.to_json())
        if "resume" in values and path.suffix == ".toml":
            raise ValueError("resume continues with the options of its run: use --resume RUN alone")
        if empty := [name for name, value in values.items() if value == "" and base.get(name) != ""]:
            raise ValueError(f"{empty[0]} is empty: set it, or leave it out")
        model = values.get("model", {})
        if not isinstance(model, dict):
            raise ValueError(f"model={model!r} must be a table")
        if model.get("family", base["model"]["family"]) != base["model"]["family"]:
            base["model"] = {}
        given = {name for name, value in values.items() if path.suffix == ".toml" or value != base.get(name)}
        return TrainConfig.from_json(json.dumps(_merged(base, values), default=_no_json)), given
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error


def run_config(folder: Path, option: str = "") -> TrainConfig:
    """The options of the run that ``folder`` is, or whose checkpoint it is. ``ValueError``, one line, for none.
    ``option``: what the folder was given to, as ``--resume``."""
    file = run_of(folder) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{option} {folder} is not a run folder (it has no config.json): use the folder of a run".strip()
        )
    try:
        return read_json(file, TrainConfig.from_json)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _parsed(path: Path) -> dict[str, Any]:
    try:
        require_file(path)
        if path.suffix not in (".toml", ".json"):
            raise ValueError(f"--config {path} must be FILE.toml, or the config.json of a run")
        values = read_json(path, tomllib.loads if path.suffix == ".toml" else json.loads)
    except OSError as error:
        raise ValueError(f"cannot read --config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must hold an object with the options of a run")
    if path.suffix == ".json":
        values |= {"out": None, "resume": None}
    return values


def _underscored(values: dict[str, Any]) -> dict[str, Any]:
    """``values``, and the tables in them, by names as in Python. ValueError for a name that is there in both forms."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        plain = name.replace("-", "_")
        if plain in found:
            raise ValueError(f"{name} is given twice: drop one")
        found[plain] = _underscored(value) if isinstance(value, dict) else value
    return found


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` in it, of tables too."""
    tables = {
        k: _merged(base[k], v) for k, v in values.items() if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return base | values | tables


def _no_json(value: object) -> None:
    raise ValueError(f"{value} is a {type(value).__name__}, which no option is: write text in quotes")

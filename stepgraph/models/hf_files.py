"""The JSON files of a Hugging Face checkpoint, and checkpoints of the Hub."""

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
    """Replace a file by one that holds ``value``."""
    errors.write_text(path, json.dumps(value, indent=2) + "\n")

"""The JSON files of a Hugging Face checkpoint."""

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ``ValueError`` where the file is missing or holds none."""
    if not path.exists():
        raise ValueError(f"{path} is missing; give the folder of a Hugging Face checkpoint")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object; download it again")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file aside and give it its name when it is whole."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)

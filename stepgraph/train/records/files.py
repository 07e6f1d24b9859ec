"""The JSON files of a run: strict JSON, and never half written."""

import json
import math
from pathlib import Path
from typing import Any

from stepgraph.errors import read_json, require_file, write_text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, without a last line cut off by a crash. ValueError for another bad line."""
    require_file(path)
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # of JSON, or of UTF-8
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: repair or delete that line") from error
            break
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"{path} line {number} has no step: repair or delete that line")
        records.append(record)
    return records


def status_of(run: Path) -> str | None:
    """The status in the summary.json of ``run``; None without one."""
    try:
        found = read_json(run / "summary.json")
    except (OSError, ValueError):
        return None
    return found.get("status") if isinstance(found, dict) else None


def json_line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold (nan, inf) as None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

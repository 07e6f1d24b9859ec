"""Options that the benchmarks share."""

from collections.abc import Collection
from pathlib import Path

from stepgraph.errors import unknown_name


def provider_names(text: str, known: Collection[str]) -> list[str]:
    """The providers of ``--providers``, in order, each once. Raises ValueError for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise unknown_name("provider", name, known)
    return names


def require_folder(json: Path | None) -> None:
    """Raises ValueError, before anything is measured, if the record of ``--json`` could not be written."""
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"json={json}: the folder {json.parent} does not exist; make it first")

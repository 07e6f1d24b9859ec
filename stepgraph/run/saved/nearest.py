"""What a start that finds no saved step is told: in what the nearest one differs."""

import gzip
from typing import Any

from stepgraph.run.saved import key
from stepgraph.run.saved.folder import DamagedEntry, Folder, UnsafeFolder

#: So many saved steps are looked at.
_COMPARED = 16


def missed_start(folder: Folder, parts: dict[str, Any]) -> list[str]:
    """Why a step is captured again."""
    found = _nearest(folder, "start", parts)
    if found is None:
        return []
    return [f"captured, as no saved start is this one; the nearest differs in {_told(found[1])}"]


def missed_graph(folder: Folder, parts: dict[str, Any], text: str) -> list[str]:
    """Why a captured step, with this ``text``, is rewritten and compiled again."""
    found = _nearest(folder, "graph", parts)
    if found is None or not found[1]:  # the one that is wanted is there, and why it is of no use is told
        return []
    name, differing = found
    if len(differing) == 1 and differing[0].startswith("graph"):
        differing = [f"the graph, first at {_first_difference(_text(folder, name), text)}"]
    return [f"no saved step fits; the nearest differs in {_told(differing)}"]


def _nearest(folder: Folder, kind: str, parts: dict[str, Any]) -> tuple[str, list[str]] | None:
    """(the saved entry that differs in the fewest parts, what differs); None where there is none.

    The automatic folder holds the steps of all that a user trains: there another model's is not near, and that it
    differs is no news.
    """
    best: tuple[str, list[str]] | None = None
    try:
        names = folder.names(kind)[:_COMPARED]
    except UnsafeFolder:
        return None
    for name in names:
        try:
            saved = folder.parts(name)
        except (DamagedEntry, UnsafeFolder):
            continue
        if not folder.given and _model(saved) != _model(parts):
            continue
        found = key.difference(saved, parts)
        if best is None or len(found) < len(best[1]):
            best = name, found
    return best


def _model(parts: dict[str, Any]) -> Any:
    """What tells models apart: of a start its description, of a graph how many nodes it has."""
    return parts["model"] if "model" in parts else parts.get("graph", {}).get("nodes")


def _text(folder: Folder, name: str) -> str:
    try:
        entry = folder.read(name)
    except (DamagedEntry, UnsafeFolder):
        return ""
    return gzip.decompress(entry.files["captured.txt.gz"]).decode() if entry else ""


def _told(differing: list[str]) -> str:
    """What differs, as `key.difference` found it: one thing in full, of several, which make another step, the names."""
    return ", ".join(differing if len(differing) == 1 else [part.partition(" (")[0] for part in differing])


def _first_difference(saved: str, now: str) -> str:
    for a, b in zip(saved.splitlines(), now.splitlines(), strict=False):
        if a != b:
            return f"{b.strip()[:60]!r}, saved was {a.strip()[:60]!r}"
    return "its end, or a number that the text leaves out"

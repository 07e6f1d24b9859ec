"""Finds the checkpoints of a run, and distinguishes whole ones from damaged ones."""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from stepgraph.train.checkpoint.files import sha256

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
# `.replaced` is the older of two checkpoints of one step, between the two renames that swap them.
_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")


def resolve(path: str | os.PathLike) -> Path:
    """The ``step-*`` folder that ``path`` means: itself, or the newest complete one of a run or ``checkpoints`` folder.

    Errors: ValueError, one line, when there is none: what is there and what is expected.
    """
    path = Path(path)
    if not path.is_dir():
        here = ", ".join(found.name for found in checkpoints(path.parent))
        fix = f"{path.parent} has {here}: give one of them" if here else "give a run folder or a step-* folder"
        raise ValueError(f"{path} is {'a file' if path.exists() else 'not there'}; {fix}")
    if _STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if found := newest(folder):
        return found
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY))
    if damaged := checkpoints(folder):
        raise ValueError(
            f"every checkpoint in {folder} is damaged ({', '.join(p.name for p in damaged)}); start a new run"
        )
    if folder == path and (path / "config.json").is_file():
        raise ValueError(
            f"the run {path} has no checkpoint, and one is written every --checkpoint-every steps and at the end: give "
            "another run, or start a new one"
        )
    if folder != path or folder.name == "checkpoints" or not names:
        raise ValueError(f"{folder} holds no checkpoint yet; give the folder of a run that has saved one")
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise ValueError(
        f"{path} is not a checkpoint: it holds {shown}; give a run folder with checkpoints/, or one step-* folder "
        f"with {MANIFEST}"
    )


class DamagedError(ValueError):
    """A checkpoint folder that does not match its manifest; the message names the file."""


def checkpoints(folder: Path) -> list[Path]:
    """Every step folder, newest first; a replaced one right after the one that replaces it."""
    folders = [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()]
    found = [(m, path) for path in folders if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda e: (int(e[0][1]), e[0][2] is None), reverse=True)]


def step_of(path: Path) -> int:
    return int(_STEP.fullmatch(path.name)[1])


def is_sound(path: Path) -> bool:
    """Whether every file is there with its size."""
    try:
        verify(path, contents=False)
    except ValueError:
        return False
    return True


def newest(folder: Path) -> Path | None:
    for path in checkpoints(folder):
        try:
            verify(path, contents=False)
        except DamagedError as error:
            if not path.is_dir():  # a run that still trains has deleted it since, and has a newer one
                return newest(folder)
            warnings.warn(f"checkpoint {path} is skipped: {error}", stacklevel=3)
        else:
            return path
    return None


def advice(damaged: Path) -> str:
    """What to load instead of ``damaged``: the newest earlier checkpoint in the same folder that passes every check."""
    siblings = checkpoints(damaged.parent)
    for path in siblings[siblings.index(damaged) + 1 :] if damaged in siblings else ():
        with contextlib.suppress(DamagedError):
            verify(path, contents=True)
            return f"the earlier {path} is intact: delete {damaged.name} and resume again"
    return "no earlier checkpoint is usable, start a new run"


def verify(path: Path, *, contents: bool, rank: int = 0, world: int = 1) -> dict:
    """The manifest, after comparing every file's size and, with ``contents``, the SHA-256 of this rank's share."""
    manifest = read_manifest(path)
    for index, (name, entry) in enumerate(manifest["files"].items()):
        file = path / name
        with _present(file):
            if (size := file.stat().st_size) != entry["size"]:
                raise DamagedError(f"{name} has {size} bytes, {entry['size']} were written")
            if contents and index % world == rank and sha256(file) != entry["sha256"]:
                raise DamagedError(f"{name} does not match its SHA-256")
    return manifest


@contextlib.contextmanager
def _present(file: Path) -> Iterator[None]:
    """Raises `DamagedError` where ``file`` is missing, be it since it was looked for, or no file."""
    if file.exists() and not file.is_file():
        raise DamagedError(f"{file.name} is no file")
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedError(f"{file.name} is missing") from error


def render(manifest: dict) -> bytes:
    """The bytes of the manifest: JSON with its own SHA-256, so that any changed byte is detected."""
    body = json.dumps(manifest, indent=1)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), **manifest}, indent=1).encode()


def read_manifest(path: Path) -> dict:
    file = path / MANIFEST
    with _present(file):
        raw = file.read_bytes()
    try:
        manifest = json.loads(raw)
        found = manifest.pop("format", None), manifest.pop("sha256", None)
    except (ValueError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is not readable JSON") from error
    manifest = {"format": found[0], **manifest}
    if render(manifest) != raw:
        raise DamagedError(f"{MANIFEST} does not match its SHA-256")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {manifest['format']}, this stepgraph reads {FORMAT}; update stepgraph"
        )
    return manifest

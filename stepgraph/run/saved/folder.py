"""Folders of saved steps: entries are written atomically, and read only if every byte is unchanged.

An entry is a folder of files with a ``manifest.json``: its first line is the SHA-256 of the rest, a JSON object with
the size and SHA-256 of each file and the parts of the key that the entry was saved under.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepgraph.cache import named_cache

MANIFEST = "manifest.json"
#: Entries that the automatic folder keeps; the least recently used go first.
MOST_ENTRIES = 512
_WRITING = ".writing-"
_STALE_S = 86_400


class DamagedEntry(ValueError):
    """An entry whose files are not what was written."""


class UnsafeFolder(ValueError):
    """A folder that others could have written."""


def cache_folder() -> Path | None:
    """The folder for automatic saving; None if it is off."""
    return named_cache("steps")


@dataclass(frozen=True)
class Entry:
    """``parts``: of its key. ``files``: the content of each, already compared with its hash."""

    parts: dict[str, Any]
    files: dict[str, bytes]


class Folder:
    """The entries in ``path``. ``given``: the user named it, so whose it is does not matter."""

    def __init__(self, path: Path, given: bool):
        self.path, self.given = Path(path), given

    def check(self) -> None:
        """Raise `UnsafeFolder` if another user may write here and the folder was not named."""
        if self.given or not os.path.exists(self.path):
            return
        _refuse_foreign(self.path)

    def names(self) -> list[str]:
        """The entries, the newest first."""
        self.check()
        found = [entry for entry in _folders(self.path) if not entry.name.startswith(".")]
        return [entry.name for entry in sorted(found, key=lambda entry: -_time(entry))]

    def parts(self, name: str) -> dict[str, Any]:
        """The parts of an entry's key, without its files. Raises `DamagedEntry`."""
        return self._manifest(name)["parts"]

    def read(self, name: str) -> Entry | None:
        """An entry with all its files, or None where there is none. Raises `DamagedEntry` if one byte differs."""
        self.check()
        if not (self.path / name).exists():
            return None
        manifest = self._manifest(name)
        files = {}
        for file, (size, digest) in manifest["files"].items():
            data = self._bytes(name, file)
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                raise DamagedEntry(f"{self.path / name / file} is not what was saved")
            files[file] = data
        with contextlib.suppress(OSError):  # used now; a folder that is only to be read keeps its time
            os.utime(self.path / name)
        return Entry(manifest["parts"], files)

    def _manifest(self, name: str) -> dict[str, Any]:
        if not self.given:
            _refuse_foreign(self.path / name)
        digest, _, body = self._bytes(name, MANIFEST).partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise DamagedEntry(f"{self.path / name / MANIFEST} is not what was saved")
        return json.loads(body)

    def _bytes(self, name: str, file: str) -> bytes:
        path = self.path / name / file
        try:
            return path.read_bytes()
        except OSError as failure:
            raise DamagedEntry(f"{path}: {failure.strerror}") from None

    def write(self, name: str, parts: dict[str, Any], files: dict[str, bytes], *, replace: bool = False) -> None:
        """Write an entry atomically, or keep the existing one (``replace``: it is damaged). Raises ``OSError``."""
        self.path.mkdir(parents=True, exist_ok=True, mode=self._mode)
        self.check()
        aside = self._aside()
        try:
            listed = {}
            for file, data in files.items():
                _write(aside / file, data)
                listed[file] = [len(data), hashlib.sha256(data).hexdigest()]
            body = json.dumps({"files": listed, "parts": parts}, indent=1).encode()
            _write(aside / MANIFEST, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            self._publish(aside, name, replace)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._clear()

    @property
    def _mode(self) -> int:
        """The mode of folders that are created: a named one is the caller's to share, as the umask says."""
        return 0o777 if self.given else 0o700

    def _aside(self) -> Path:
        """A new folder, in which nothing is looked for."""
        path = self.path / f"{_WRITING}{secrets.token_hex(8)}"
        path.mkdir(mode=self._mode)
        return path

    def _publish(self, aside: Path, name: str, replace: bool) -> None:
        if replace:
            shutil.rmtree(self.path / name, ignore_errors=True)
        try:
            os.rename(aside, self.path / name)
        except OSError:
            if not (self.path / name).is_dir():  # else another process was first, with the same step
                raise

    def _clear(self) -> None:
        """Remove what writers that were killed left behind, and old entries of the automatic folder."""
        for entry in _folders(self.path):
            if entry.name.startswith(_WRITING) and time.time() - _time(entry) > _STALE_S:
                shutil.rmtree(entry, ignore_errors=True)
        if self.given:
            return
        kept = [entry for entry in _folders(self.path) if not entry.name.startswith(".")]
        for entry in sorted(kept, key=_time)[:-MOST_ENTRIES]:
            shutil.rmtree(entry, ignore_errors=True)


def _folders(path: Path) -> Iterator[Path]:
    """The folders in ``path``; none where that does not exist or may not be read: writing there says why."""
    with contextlib.suppress(OSError):
        yield from (entry for entry in path.iterdir() if os.path.isdir(entry))


def _time(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _write(file: Path, data: bytes) -> None:
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _refuse_foreign(path: Path) -> None:
    try:
        found = os.lstat(path)
    except OSError:  # nothing is read from it then
        return
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnsafeFolder(
            f"{path} may have been written by others (a link, another owner, or open to a group): a saved step is "
            "code, so name the folder if you trust it"
        )

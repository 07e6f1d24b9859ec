"""Files packed by gzip, unpacked once: documents are read in any order, which a packed file does not allow."""

import gzip
import hashlib
import os
import shutil
import zlib
from pathlib import Path

from stepgraph.train.data.token_cache import default_folder


def unpacked(path: Path) -> Path:
    """A copy of ``path`` without its ``.gz``, kept next to the token caches and made again when ``path`` is written to.

    Raises:
        ValueError: one line; it is no such file, or there is no room for the copy.
    """
    facts = path.stat()
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    folder = default_folder().with_name("unpacked") / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    target = folder / path.stem
    if not target.exists():
        _unpack(path, target)
    if not target.stat().st_size:
        raise ValueError(f"{path} is empty: give a file with text")
    return target


def _unpack(path: Path, target: Path) -> None:
    folder = target.parent
    aside = folder / f".{path.stem}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(path) as source, aside.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        aside.replace(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a readable gzip file ({error}): copy or download it again") from error
    except OSError as error:
        raise ValueError(f"cannot unpack {path} into {folder}: {error.strerror}; make room there") from error
    finally:
        aside.unlink(missing_ok=True)

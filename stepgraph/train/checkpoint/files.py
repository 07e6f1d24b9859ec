"""The files of checkpoints: found, whole or damaged, synced to disk, and read by torch.distributed.checkpoint (DCP).

DCP's index ``.metadata`` is a pickle, which DCP itself would load without restriction. Here a restricted unpickler
reads it: only DCP's own plain data classes are allowed, and only tensors as entries.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

# ---- files ----


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder (a rename, a new file)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- torch.distributed.checkpoint ----

# The names in a `.metadata` pickle: DCP's plain data classes and torch's plain values. Python 3.13 moved PosixPath.
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _INDEX_NAMES:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which is not part of a checkpoint")
        return super().find_class("pathlib" if name == "PosixPath" else module, name)


class _IndexReader(dcp.FileSystemReader):
    """DCP's reader with the safe index."""

    def read_metadata(self, *args: object, **kwargs: object) -> dcp.Metadata:
        with open(self.path / ".metadata", "rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, dcp.TensorStorageMetadata):
                raise pickle.UnpicklingError(f".metadata holds {name!r}, which is not a tensor")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f".metadata leads to {info.relative_path!r}, out of the checkpoint")
        return metadata


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silences DCP's warning that there is no process group, which is supported here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


def dcp_save(tensors: dict[str, torch.Tensor], folder: Path, group: torch.distributed.ProcessGroup | None) -> None:
    """Write this rank's part of ``tensors`` and, on rank 0, the index; the caller syncs them. ``group``: what the ranks
    meet in, None for the default of all. Errors: OSError.

    DCP's own ``sync_files`` calls fsync on the index before Python's buffer is flushed, so its end may get lost. Where
    there is a GPU, DCP waits for the training's stream even when all tensors are on the CPU, unless it copies none
    ahead: a save in the background would wait for a step or two with each large tensor.
    """
    on_host = all(local(tensor).device.type == "cpu" for tensor in tensors.values())
    try:
        with _one_process_is_fine():
            ahead = {"per_thread_copy_ahead": 0} if on_host else {}
            writer = dcp.FileSystemWriter(folder, sync_files=False, **ahead)
            dcp.save(tensors, storage_writer=writer, **({} if group is None else {"process_group": group}))
    except dcp.CheckpointException as error:
        raise _unwrapped(error) from error


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_index(folder: Path) -> None:
    """Raise pickle.UnpicklingError when the index names anything but tensors and DCP's own data classes."""
    _IndexReader(folder).read_metadata()


def dcp_load(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read every one of ``tensors`` in place. Errors: OSError."""
    try:
        with _one_process_is_fine():
            dcp.load(tensors, storage_reader=_IndexReader(folder))
    except dcp.CheckpointException as error:
        raise _unwrapped(error) from error


def _unwrapped(error: dcp.CheckpointException) -> BaseException:
    """The first rank's own error; Ctrl-C stays Ctrl-C.

    torch.save turns the OSError of a full disk into a RuntimeError (`unexpected pos`): the OSError is wanted.
    """
    cause = next(iter(error.failures.values()))[0]
    reason = cause if isinstance(cause, Exception) else None
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__context__
    return reason or cause


FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
# `.replaced` is the older of two checkpoints of one step, between the two renames that swap them.
_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")


def resolve(path: str | os.PathLike) -> Path:
    """The ``step-*`` folder that ``path`` means: itself, or the newest complete one of a run or ``checkpoints`` folder.

    Errors: ValueError, one line, when there is none: what exists and what is expected.
    """
    path = Path(path)
    if not path.is_dir():
        here = ", ".join(found.name for found in checkpoints(path.parent))
        fix = f"{path.parent} has {here}: use one of them" if here else "use a run folder or a step-* folder"
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
            f"the run {path} has no checkpoint, and one is written every --checkpoint-every steps and at the end: use "
            "another run, or start a new one"
        )
    if folder != path or folder.name == "checkpoints" or not names:
        raise ValueError(f"{folder} holds no checkpoint yet; use the folder of a run that has saved one")
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise ValueError(
        f"{path} is not a checkpoint: it holds {shown}; use a run folder with checkpoints/, or one step-* folder "
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
    """Whether every file exists with its recorded size."""
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
    """Raises `DamagedError` if ``file`` is missing, even if it was there before, or is not a file."""
    if file.exists() and not file.is_file():
        raise DamagedError(f"{file.name} is not a file")
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

"""How a checkpoint reaches the disk and comes back: synced files, and torch.distributed.checkpoint (DCP).

DCP's index ``.metadata`` is a pickle, which DCP itself would load without restriction. Here a restricted unpickler
reads it: only DCP's own plain data classes are allowed, and only tensors as entries.
"""

import contextlib
import hashlib
import os
import pickle
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
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which is no part of a checkpoint")
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

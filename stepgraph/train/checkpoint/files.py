"""How a checkpoint reaches the disk and comes back: synced files, and torch.distributed.checkpoint (DCP).

DCP's index ``.metadata`` is a pickle, which DCP itself would load without restriction. Here a restricted unpickler
reads it: only DCP's own plain data classes are allowed, and only tensors as entries.
"""

import contextlib
import hashlib
import itertools
import math
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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


def check_index(folder: Path, tensors: dict[str, list], sizes: dict[str, int]) -> None:
    """Compare the index, whole, with ``tensors``, ``{name: [shape, dtype]}``, and with the ``sizes`` of the files.

    Errors: pickle.UnpicklingError when the index names anything but tensors and DCP's own data classes; ValueError
    where names, shapes or dtypes differ, where the chunks of a tensor do not cover it exactly, and where their places
    in the files do not exist or overlap.
    """
    index = _IndexReader(folder).read_metadata()
    entries, stored = index.state_dict_metadata, index.storage_data
    if odd := sorted(entries.keys() ^ tensors.keys()):
        raise ValueError(f"{odd[0]!r} is {'not ' * (odd[0] not in entries)}in the index")
    places: list[tuple[str, int, int]] = []
    found = {(key.fqn, tuple(key.offset or ())): info for key, info in stored.items()}
    for name, (shape, dtype) in tensors.items():
        entry = entries[name]
        if [list(entry.size), entry.properties.dtype] != [shape, getattr(torch, dtype)]:
            there = f"{tuple(entry.size)} {entry.properties.dtype}"
            raise ValueError(f"{name!r} is {there} in the index, not {tuple(shape)} {dtype}")
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        if not _covers(shape, chunks):
            raise ValueError(f"the chunks of {name!r} do not cover it exactly")
        for offsets, extent in chunks:
            info = found[name, offsets]
            bytes_ = math.prod(extent) * entry.properties.dtype.itemsize
            if not (info.offset >= 0 and bytes_ <= info.length <= sizes[info.relative_path] - info.offset):
                raise ValueError(f"the place of {name!r} in {info.relative_path} is not there")
            places.append((info.relative_path, info.offset, info.offset + info.length))
    places.sort()
    if any(one[0] == other[0] and one[2] > other[1] for one, other in itertools.pairwise(places)):
        raise ValueError("two chunks have one place")


def _covers(shape: list[int], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether every element of a tensor is in exactly one of ``chunks``, (offsets, sizes)."""
    if not all(len(shape) == len(offsets) == len(sizes) for offsets, sizes in chunks):
        return False
    parts = [chunk for chunk in chunks if math.prod(chunk[1])]
    starts, extents = (np.array([part[i] for part in parts], np.int64).reshape(len(parts), len(shape)) for i in (0, 1))
    ends = starts + extents
    inside = bool((starts >= 0).all() and (ends > starts).all() and (ends <= np.array(shape, np.int64)).all())
    apart = all(((a < ends) & (starts < b)).all(axis=1).sum() == 1 for a, b in zip(starts, ends, strict=True))
    return inside and apart and sum(math.prod(sizes) for _, sizes in parts) == math.prod(shape)


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

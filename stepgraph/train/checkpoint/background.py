"""Checkpoints that are written while the run continues: the state is copied to the host, a thread writes it."""

import os
import re
import threading
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from stepgraph import compat
from stepgraph.errors import first_line
from stepgraph.train.checkpoint.checkpointer import Checkpointer, tensors_of
from stepgraph.train.checkpoint.files import local

_MEMORY = Path("/proc/meminfo")


class BackgroundSaves:
    """Saves of ``checkpointer`` whose files a thread writes, one checkpoint at a time.

    The run waits only while the state is copied, from a GPU into page-locked memory of the host, which is kept for the
    next save: at least as many bytes as this rank's parameters and optimizer state, as torch rounds the size of each
    tensor up to a power of two. Taking that memory is much slower than the copy: :meth:`prepare` does it in a thread.
    Every rank begins the same saves in the same order. Their threads meet in ``group``, of gloo, which no other thread
    uses; None for one process.
    """

    def __init__(self, checkpointer: Checkpointer, group: torch.distributed.ProcessGroup | None = None):
        self.checkpointer, self.group = checkpointer, group
        self._copies: dict[str, torch.Tensor] = {}
        self._preparing: threading.Thread | None = None
        self._enough = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lines: list[str] = []

    def prepare(self, state: dict) -> None:
        """Let a thread take the host memory for copies of ``state``. The first save waits until it is done; where it
        fails, that save tries again and says why."""
        self._enough.clear()
        missing = self._missing(tensors_of(state))

        def run() -> None:
            began = time.perf_counter()
            try:
                self._allocate(missing)
            except MemoryError:
                return
            if missing and not self._enough.is_set():
                room, seconds = sum(map(_room_of, missing.values())) / 2**30, time.perf_counter() - began
                self._lines.append(f"host memory for copies of the state: {room:.2f} GiB, ready after {seconds:.1f} s")

        self._preparing = threading.Thread(target=run, name="memory for checkpoints", daemon=True)
        self._preparing.start()

    def begin(self, step: int, state: dict, evict: bool = True) -> float:
        """Begin to save ``state`` after ``step`` updates, as `Checkpointer.save` does; the seconds that the run waited,
        which include the wait for the save before it and for the memory.

        Raises what the save before raised: OSError, one line; and ValueError for a state that cannot be saved.
        """
        began = time.perf_counter()
        if self._preparing is not None:
            self._preparing.join()
        self.finish()
        write = self.checkpointer.collect(step, state, evict, self._copied, self.group)
        waited = time.perf_counter() - began

        def run() -> None:
            try:
                write()
            except Exception as failure:  # raised by `check` or `finish`, in the thread of the run
                self._failure = failure
            else:
                seconds = time.perf_counter() - began
                self._lines.append(
                    f"checkpoint of step {step}: the run waited {waited:.2f} s, written in {seconds:.1f} s"
                )

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()
        return waited

    def check(self) -> list[str]:
        """A line of each checkpoint that was written since. Raises what writing one raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        lines, self._lines = self._lines, []
        return lines

    def finish(self) -> None:
        """Wait for the save in progress, and raise what it raised. No further memory is allocated."""
        if self._preparing is not None:
            self._enough.set()
            self._preparing.join()
            self._preparing = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``tensors`` on the host; the memory is that of the save before where it fits."""
        self._enough.clear()
        self._allocate(self._missing(tensors))
        for name, tensor in tensors.items():
            local(self._copies[name]).copy_(local(tensor.detach()), non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()  # the next step changes what is copied
        return {name: self._copies[name] for name in tensors}

    def _missing(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The ``tensors`` without memory for a copy."""
        return {name: tensor.detach() for name, tensor in tensors.items() if not self._fits(name, tensor)}

    def _allocate(self, missing: dict[str, torch.Tensor]) -> None:
        """Memory for a copy of each of ``missing``, until there is enough."""
        _require_room(sum(map(_room_of, missing.values())))
        for name, tensor in missing.items():
            if self._enough.is_set():
                return
            gpu, part = tensor.device.type == "cuda", local(tensor)
            try:  # operators on DTensors hold Python's lock, which the run's thread needs
                there = torch.empty_like(part, device="cpu", pin_memory=gpu)
            except RuntimeError as failure:  # torch's for memory that the system does not give
                raise MemoryError(f"no host memory for a copy of the state: {first_line(failure)}") from failure
            if not gpu:
                there.zero_()  # page-locked memory is allocated at once, other memory when it is written to
            self._copies[name] = compat.with_local(tensor, there) if isinstance(tensor, DTensor) else there

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        there = self._copies.get(name)
        return there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype)


def _require_room(needed: int) -> None:
    """Raises MemoryError, in one line, where the host's free memory has no room for ``needed`` bytes of each rank."""
    known = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY.read_text()) if _MEMORY.exists() else None
    room = int(known[1]) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if known else needed
    if needed > room:
        raise MemoryError(
            f"a copy of the state takes {needed / 2**30:.2f} GiB of host memory per rank, {room / 2**30:.2f} are free"
        )


def _room_of(tensor: torch.Tensor) -> int:
    """The bytes that a copy of ``tensor`` takes on this rank's host: torch rounds page-locked memory up."""
    size = local(tensor).numel() * tensor.element_size()
    return 1 << (size - 1).bit_length() if size and tensor.device.type == "cuda" else size

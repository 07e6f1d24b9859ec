"""The device of a run: which one, its name, its peak, its memory."""

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

import torch

from stepgraph.config.train import TrainConfig
from stepgraph.costs.hardware import peak_flops


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU here: use --device cpu or --device auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_of(config: TrainConfig) -> torch.device:
    """What a run of ``config`` computes on. Raises ``ValueError`` for options that this device does not have."""
    device = pick_device(config.device)
    if config.memory_snapshot and device.type == "cpu":
        raise ValueError("memory_snapshot records a GPU's allocations and torch sees no GPU here: leave it out")
    require_memory(config, device)
    return device


def require_memory(config: TrainConfig, device: torch.device) -> None:
    """Raise ``ValueError`` where the parameters of ``config``'s model alone exceed the memory of ``device``, before any
    of its modules is made: a billion layers would take hours."""
    model, ranks = config.model, config.mesh_spec.size if config.mesh_spec else 1
    size = 2 if config.precision == "bf16" and ranks == 1 else 4
    needs, has = model.num_params() * size // ranks, memory_bytes(device)
    if needs > has:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"the model does not fit: its parameters alone take {needs / 2**30:.1f} GiB{each}, "
            f"the {device.type} device has {has / 2**30:.1f} GiB; lower dim={model.dim} or n_layers={model.n_layers}"
        )


def device_name(device: torch.device) -> str:
    """What the run computes on, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU with {threads} thread{'s' * (threads != 1)}"


def device_peak(config: TrainConfig, device: torch.device) -> float | None:
    """Peak FLOP/s of ``device`` in the precision of the run's matrix products, None where it is unknown."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.products_dtype)


def peak_mem_gib(device: torch.device) -> float:
    """Peak memory so far, GiB: allocated by torch on a CUDA ``device``, or resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        # Not getrusage: its peak starts at that of the process which started this one.
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(peak[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS


def memory_bytes(device: torch.device) -> int:
    """Bytes of memory of ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def taken_by_others(device: torch.device) -> str:
    """The end of an error message: how much memory of a GPU other processes hold. Empty below a tenth of its memory,
    which may be this process's own CUDA context and NCCL buffers, since torch does not count them."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return f"; other processes hold {others / 2**30:.1f} GiB of it: end them" if others >= total / 10 else ""


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether an allocation failed; on the CPU torch raises a plain RuntimeError for it."""
    return isinstance(failure, torch.OutOfMemoryError) or (
        isinstance(failure, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(failure)
    )


# Parameters of glibc's mallopt, from <malloc.h>.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for the next step; whether it did (False without glibc).

    By default every large tensor is mapped again and returned to the system when freed, so that each step takes a page
    fault, with 4 KiB to clear, for all that it allocates. The process keeps its peak instead. Source: mallopt(3).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, -1))

"""The history of the CUDA allocator."""

from pathlib import Path

import torch


def record_memory(on: bool) -> None:
    """Record every allocation on the GPUs, with Python's stack, from now on; or no more."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_memory(path: Path) -> None:
    """Write what was recorded to ``path``, a pickle for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))

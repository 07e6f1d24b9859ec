"""Measures times on a device."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """A point in time; on CUDA in the current stream, so that nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spans(marks: Sequence[Any]) -> list[float]:
    """Milliseconds between neighbours among ``marks``, once the device has passed the last."""
    if isinstance(marks[0], torch.cuda.Event):
        marks[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]
    return [1000 * (b - a) for a, b in pairwise(marks)]


def times(device: torch.device, call: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of each of ``repeats`` calls. On CUDA by events in the stream, so that nothing waits in between."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    marks = [mark(device)]
    for _ in range(repeats):
        call()
        marks.append(mark(device))
    return spans(marks)

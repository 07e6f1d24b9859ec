"""Measures times on a device, and reports which kernels it ran."""

import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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


def times(device: torch.device, parts: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Milliseconds of each of ``parts``, run in turn ``repeats`` times. On CUDA by events in the stream, so that
    nothing waits in between."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    marks = [mark(device)]
    for _ in range(repeats):
        for part in parts:
            part()
            marks.append(mark(device))
    found = spans(marks)
    return [found[i :: len(parts)] for i in range(len(parts))]


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """The names of the CUDA kernels of ``call``, without template arguments, in the order of first use.

    torch comes with several kernels for one function, and picks by shape and version. Call ``call`` once before: a
    first call may compile its kernel.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    return list(dict.fromkeys(re.sub(r"^void |\(anonymous namespace\)::|<.*", "", name) for name in names))

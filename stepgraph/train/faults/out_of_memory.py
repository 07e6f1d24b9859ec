"""Out of memory, reported in one line: what was asked for, and which memory policy would fit."""

import re
import traceback
from collections.abc import Callable

from stepgraph.config.device import is_out_of_memory, memory_bytes, pick_device, taken_by_others
from stepgraph.config.train import TrainConfig
from stepgraph.lower import StepSpec, peak_bytes_by_policy

#: The share of a device's memory below which a step is not what fills it.
_LEAST_SHARE = 0.25


def memory_advice(failure: BaseException, config: TrainConfig, step: Callable[[], StepSpec]) -> str:
    """One line for a step that ran out of memory: what was asked for, and the ``--memory`` that would fit.

    ``step`` makes what the step is, an example of its batch included.
    """
    asked = f"out of memory: asked for {asked_for(failure)}{taken_by_others(pick_device(config.device))}"
    traceback.clear_frames(failure.__traceback__)  # they hold the failed step's activations
    try:
        spec = step()
    except RuntimeError as again:
        if not is_out_of_memory(again):
            raise
        return f"{asked}; a batch alone does not fit: lower --accumulate or --batch-size"
    try:
        peaks = peak_bytes_by_policy(spec)
    except RuntimeError as again:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(again):
            raise
        return f"{asked}; the parameters and the optimizer's state alone do not fit: choose a smaller model"
    total = memory_bytes(spec.device)
    known = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in peaks.items())
    asked += f"; the step's estimated peak by --memory, of {total / 2**30:.1f} GiB: {known}"
    failed = peaks.get(config.memory, float("inf"))
    if failed < _LEAST_SHARE * total:
        return f"{asked}; the step needs little of that: end what else takes memory"
    # A tenth is left for what the estimate does not cover: the CUDA context, workspaces, fragmentation.
    fits = next((name for name, size in peaks.items() if size < failed and size < 0.9 * total), None)
    if fits:
        return f"{asked}; try --memory {fits}"
    fix = "--seq-len" if config.batch_size == 1 else "--batch-size"
    return f"{asked}; no other policy fits: lower {fix}"


def asked_for(failure: BaseException) -> str:
    """The size of the allocation that failed, for people."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(failure))
    if not found:
        return "more than there is"
    return f"{int(found[1]) / 2**30:.1f} GiB" if found[2] == "bytes" else f"{found[1]} {found[2]}"

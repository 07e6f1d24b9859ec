"""Grouped products by QuACK: the optional package ``quack-kernels``, which compiles them at their first call.

    product:         `grouped.grouped_mm`, rows past the last offset uninitialized
    weight_product:  `grouped.grouped_mm_weight`

A product has one order of additions whatever runs at the same time, so it is deterministic.
Source: the package's ``quack/gemm_interface.py``, read at 0.6.5. Groups are given by where each begins, the end of the
last after them; ``tuned=False`` takes its default tiles, where tuning would time candidates inside a step.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def installed() -> bool:
    """Whether the package is there: nothing is imported."""
    return importlib.util.find_spec("quack") is not None


@functools.cache
def unavailable() -> str | None:
    """Why the package cannot be used in this process, in one line; None where it can. Loading it takes seconds."""
    if not installed():
        return "quack-kernels is not installed"
    try:
        _package()
    except Exception as error:  # it may not fit what it is built on
        return f"quack-kernels cannot be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


@functools.cache
def _package() -> ModuleType:
    module = importlib.import_module("quack.gemm_interface")
    module.gemm  # noqa: B018  (an older package has other names)
    return module


def _found() -> ModuleType:
    why = unavailable()
    if why is not None:
        raise ValueError(f"{why}: pip install quack-kernels, or choose grouped=torch")
    return _package()


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """(R, F), rows past ``offsets[-1]`` uninitialized. ``rows`` contiguous, ``weight`` dense, both in bf16."""
    return _found().gemm(rows, weight, cu_seqlens_m=F.pad(offsets, (1, 0)), tuned=False)


def weight_product(rows: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """(E, D, F), zeros for an expert without rows. ``rows`` and ``dy`` contiguous, in bf16."""
    return _found().gemm(rows.t(), dy, cu_seqlens_k=F.pad(offsets, (1, 0)), tuned=False)

"""Products by QuACK: the optional package ``quack-kernels``, which compiles them at their first call.

    gelu_product:           `gelu.gelu_product`
    gelu_product_backward:  `gelu.gelu_product_backward`
    gated_product, gated_product_backward:  as in `gated`, by epilogues of our own (`gated_quack`)

A product has one order of additions whatever runs at the same time, so it is deterministic.
Source: the package's ``quack/gemm_interface.py`` and ``quack/epilogue/library.py``, read at 0.6.5. ``tuned=False``
times no candidates inside a step. Ping-pong tiles of 128 x 128 are within 6% of the best of nine for every size that
was measured (`benchmarks/h200_epilogues.json`).
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch

from stepgraph.kernels.optional import Package

Tensor = torch.Tensor

#: What the package calls GELU, by torch's ``approximate``.
_GELU = {"none": "gelu_erf", "tanh": "gelu_tanh_approx"}


def installed() -> bool:
    """Whether the package is installed: nothing is imported."""
    return importlib.util.find_spec("quack") is not None


PACKAGE = Package("quack-kernels", "quack.gemm_interface", ("gemm",), installed, "epilogues=torch")
unavailable = PACKAGE.unavailable


def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    """``x`` (M, K), ``weight`` (K, N) and ``bias`` (N,), both in any strides, in bf16."""
    return PACKAGE.load().gemm_act(
        dense(x), dense(weight), bias=bias, activation=_GELU[approximate], tuned=False, config=_tiles()
    )


def gelu_product_backward(dy: Tensor, weight: Tensor, z: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """``dy`` (M, K), ``weight`` (K, N), both in any strides, and ``z`` (M, N), contiguous, in bf16."""
    PACKAGE.load()
    epilogue = importlib.import_module("quack.epilogue.library").dact_dbias_mod(_GELU[approximate])
    made = epilogue(dense(dy), dense(weight), z, config=_tiles())
    return made["D"], made["dwb"]


def gated_product(x: Tensor, weight: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``x`` (M, K), ``weight`` (K, N), both in any strides, and ``gate`` (M, N), contiguous, in bf16."""
    made = _gated(activation)[0](dense(x), dense(weight), gate, config=_tiles())
    return made["D"], made["a"]


def gated_product_backward(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """``dy`` (M, K), ``weight`` (K, N), both in any strides, ``gate`` and ``up`` (M, N), contiguous, in bf16."""
    made = _gated(activation)[1](dense(dy), dense(weight), gate, u=up, config=_tiles())
    return made["D"], made["du"]


def _gated(activation: str) -> Any:
    PACKAGE.load()
    return importlib.import_module("stepgraph.kernels.gated_quack").EPILOGUES[activation]


@functools.cache  # the package knows a configuration by its identity
def _tiles() -> Any:
    config = importlib.import_module("quack.gemm_config").GemmConfig
    return config(tile_m=128, tile_n=128, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


def dense(x: Tensor) -> Tensor:
    """``x``, or a copy where a kernel would refuse how it lies in memory: in rows or columns that begin at multiples
    of 16 bytes."""
    rows, columns = x.shape[-2:]
    outer, inner = x.stride()[-2:]
    along = outer if inner == 1 and outer >= columns else inner if outer == 1 and inner >= rows else 1
    aligned = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in (along, *x.stride()[:-2]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)

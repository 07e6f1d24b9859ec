"""The operators ``stepgraph::norm`` and ``stepgraph::norm_backward``: RMS or layer norm of one tensor, with residual,
bias and per-head weight. Schema, kernels for CPU and CUDA, and shapes for fake tensors.

Outputs that a call does not produce are None, as in ``aten.native_layer_norm_backward``. Gradients
and vmap are in `derivatives`, DTensor in `sharding`, the formulas and the meaning of each tensor in `spec`.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from stepgraph.kernels.ahead import launching
from stepgraph.kernels.norm import reference
from stepgraph.kernels.norm.planned import planned
from stepgraph.kernels.norm.spec import Norm, check, math_dtype

Tensor = torch.Tensor
Optional = Tensor | None

# The dtype first: DTensor caches how it sharded a call under the arguments from the first integer on, and a dtype
# counts as one. The outputs depend on the kind too, so it must come after the dtype.
_NORM = "ScalarType out_dtype, str kind, float eps, float weight_offset"

torch.library.define(
    "stepgraph::norm",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, {_NORM}, bool keep_h)"
    " -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
)
torch.library.define(
    "stepgraph::norm_backward",
    f"(Tensor dy, Tensor h, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? dh, {_NORM},"
    " ScalarType dx_dtype, bool need_dx, bool need_dw, bool need_db) -> (Tensor dx, Tensor dw, Tensor db)",
)


@functools.cache
def _triton() -> ModuleType:
    """The backend for CUDA; triton is imported on first use."""
    from stepgraph.kernels.norm.triton import single as triton_norm

    return triton_norm


#: Dtype of y, kind, eps and weight offset: a `Norm` as arguments of an operator.
Options = tuple[torch.dtype, str, float, float]


def from_options(out_dtype: torch.dtype, kind: str, eps: float, weight_offset: float) -> Norm:
    """The norm that ``Options`` describe."""
    return Norm(kind, eps, weight_offset, out_dtype)


# Both find the plan of a call, which the backend of the device makes; empty inputs are handled here.
# `_like_*` make zeros of the outputs' shapes: the fake implementation, and the right result for inputs without rows.


def _like_forward(norm: Norm, x: Tensor, residual: Optional, keep_h: bool) -> tuple[Tensor, Optional, Optional, Tensor]:
    y = x.new_empty(x.shape, dtype=norm.out_dtype)
    h = residual.new_empty(x.shape) if residual is not None and keep_h else None
    rstd = x.new_empty(x.shape[:-1], dtype=math_dtype(x.dtype))
    return y, h, torch.empty_like(rstd) if norm.kind == "layer" else None, rstd


def _forward(
    options: Options, keep_h: bool, x: Tensor, residual: Optional, weight: Optional, bias: Optional
) -> Callable[..., Sequence[Optional]]:
    norm = from_options(*options)
    check(norm, x, weight, bias, residual)
    if x.numel() == 0:
        return lambda x, residual, *_: _like_forward(norm, x, residual, keep_h)
    if x.is_cuda:
        return _triton().forward_plan(norm, keep_h, None, x, residual, weight, bias).run
    return lambda x, residual, weight, bias: reference.forward(norm, x, weight, bias, residual, keep_h)


def forward(
    options: Options, x: Tensor, weight: Optional, bias: Optional, residual: Optional, keep_h: bool
) -> Sequence[Optional]:
    """``y, h, mean, rstd`` first. Raises ``ValueError`` as `check` does."""
    return planned(_forward, (options, keep_h), x, residual, weight, bias)(x, residual, weight, bias)


def _like_backward(
    dy: Tensor, weight: Optional, dx_dtype: torch.dtype, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Optional, Optional, Optional]:
    dx = dy.new_empty(dy.shape, dtype=dx_dtype) if need_dx else None
    dw = weight.new_zeros(weight.shape) if need_dw else None
    return dx, dw, weight.new_zeros(weight.shape) if need_db else None


def _backward(
    options: Options, rest: tuple[torch.dtype, bool, bool, bool], dy: Tensor, h: Tensor, weight: Optional, dh: Optional
) -> Callable[..., Sequence[Optional]]:
    norm = from_options(*options)
    if h.numel() == 0 or not any(rest[1:]):
        return lambda dy, h, weight, *_: _like_backward(dy, weight, *rest)
    if h.is_cuda:
        return _triton().backward_plan(norm, *rest, None, dy, h, weight, dh).run
    return lambda *tensors: reference.backward(norm, *tensors, *rest)


def backward(
    options: Options, dy: Tensor, h: Tensor, weight: Optional, mean: Optional, rstd: Tensor, dh: Optional,
    *rest: Any,
) -> Sequence[Optional]:  # fmt: skip
    """``dx, dw, db`` first. ``rest``: dtype of dx, and whether dx, dw and db are needed."""
    return planned(_backward, (options, rest), dy, h, weight, dh)(dy, h, weight, mean, rstd, dh)


@torch.library.impl("stepgraph::norm", ("cpu", "cuda"))
@launching("norm")
def _norm(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h):
    return tuple(forward((out_dtype, kind, eps, weight_offset), x, weight, bias, residual, keep_h)[:4])


@torch.library.register_fake("stepgraph::norm")
def _norm_fake(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    check(norm, x, weight, bias, residual)
    return _like_forward(norm, x, residual, keep_h)


@torch.library.impl("stepgraph::norm_backward", ("cpu", "cuda"))
@launching("norm_backward")
def _norm_backward(dy, h, weight, mean, rstd, dh, out_dtype, kind, eps, weight_offset, dx_dtype, *needs):
    mean, options = None if mean is None else mean.contiguous(), (out_dtype, kind, eps, weight_offset)
    return tuple(backward(options, dy, h, weight, mean, rstd.contiguous(), dh, dx_dtype, *needs)[:3])


@torch.library.register_fake("stepgraph::norm_backward")
def _norm_backward_fake(dy, h, weight, mean, rstd, dh, out_dtype, kind, eps, weight_offset, dx_dtype, *needs):
    return _like_backward(dy, weight, dx_dtype, *needs)

"""The four operators of ``torch.ops.stepgraph``: schema, kernels for CPU and CUDA, and shapes for fake tensors.

    norm, norm_backward              one tensor: RMS or layer norm, with residual, bias, per-head weight
    norm_pair, norm_pair_backward    q and k in one launch

Outputs that a call does not produce are None, as in ``aten.native_layer_norm_backward``. Gradients
and vmap are in `derivatives`, DTensor in `sharding`, the formulas and the meaning of each tensor in `spec`.
"""

import functools
from types import ModuleType

import torch

from stepgraph.kernels.ahead import launching
from stepgraph.kernels.norm import reference
from stepgraph.kernels.norm.spec import Norm, check, check_pair, math_dtype

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
torch.library.define(
    "stepgraph::norm_pair",
    f"(Tensor q, Tensor k, Tensor? wq, Tensor? wk, {_NORM}) -> (Tensor yq, Tensor yk, Tensor rstd_q, Tensor rstd_k)",
)
torch.library.define(
    "stepgraph::norm_pair_backward",
    f"(Tensor dyq, Tensor dyk, Tensor q, Tensor k, Tensor? wq, Tensor? wk, Tensor rstd_q, Tensor rstd_k, {_NORM},"
    " bool need_dx, bool need_dw) -> (Tensor dq, Tensor dk, Tensor dwq, Tensor dwk)",
)


@functools.cache
def _triton() -> ModuleType:
    """The backend for CUDA; triton is imported on first use."""
    from stepgraph.kernels.norm.triton import single as triton_norm

    return triton_norm


def options(norm: Norm) -> tuple[torch.dtype, str, float, float]:
    """``norm`` as arguments of an operator."""
    return norm.out_dtype, norm.kind, norm.eps, norm.weight_offset


def from_options(out_dtype: torch.dtype, kind: str, eps: float, weight_offset: float) -> Norm:
    """The inverse of `options`."""
    return Norm(kind, eps, weight_offset, out_dtype)


def rows(gradient: Tensor) -> Tensor:
    """``gradient`` with last stride 1, as backends need it; autograd may send it expanded or transposed."""
    return gradient if gradient.stride(-1) == 1 or gradient.shape[-1] == 1 else gradient.contiguous()


# Each of the four handles empty inputs here and leaves the rest to the backend. `_like_*` make zeros of the outputs'
# shapes: the fake implementation, and the right result for inputs without rows.


def _like_forward(norm: Norm, x: Tensor, residual: Optional, keep_h: bool) -> tuple[Tensor, Optional, Optional, Tensor]:
    y = x.new_empty(x.shape, dtype=norm.out_dtype)
    h = residual.new_empty(x.shape) if residual is not None and keep_h else None
    rstd = x.new_empty(x.shape[:-1], dtype=math_dtype(x.dtype))
    return y, h, torch.empty_like(rstd) if norm.kind == "layer" else None, rstd


def forward(
    norm: Norm, x: Tensor, weight: Optional, bias: Optional, residual: Optional, keep_h: bool
) -> tuple[Tensor, Optional, Optional, Tensor]:
    """``(y, h, mean, rstd)`` from the backend of the device. Raises ``ValueError`` as `check` does.

    The CUDA backend checks only when it makes a plan: checking every call would take longer than the rest of it.
    """
    if x.is_cuda and x.numel():
        return _triton().forward(norm, x, weight, bias, residual, keep_h)
    check(norm, x, weight, bias, residual)
    if x.numel() == 0:
        return _like_forward(norm, x, residual, keep_h)
    return reference.forward(norm, x, weight, bias, residual, keep_h)


def _like_backward(
    dy: Tensor, weight: Optional, dx_dtype: torch.dtype, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Optional, Optional, Optional]:
    dx = dy.new_empty(dy.shape, dtype=dx_dtype) if need_dx else None
    dw = weight.new_zeros(weight.shape) if need_dw else None
    return dx, dw, weight.new_zeros(weight.shape) if need_db else None


def backward(
    norm: Norm,
    dy: Tensor,
    h: Tensor,
    weight: Optional,
    mean: Optional,
    rstd: Tensor,
    dh: Optional,
    dx_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[Optional, Optional, Optional]:
    """``(dx, dw, db)`` from the backend of the device."""
    if h.numel() == 0:
        return _like_backward(dy, weight, dx_dtype, need_dx, need_dw, need_db)
    dy = rows(dy)
    dh = None if dh is None else rows(dh)
    run = _triton().backward if h.is_cuda else reference.backward
    return run(norm, dy, h, weight, mean, rstd, dh, dx_dtype, need_dx, need_dw, need_db)


def _like_pair(norm: Norm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    yq, _, _, rstd_q = _like_forward(norm, q, None, False)
    yk, _, _, rstd_k = _like_forward(norm, k, None, False)
    return yq, yk, rstd_q, rstd_k


def forward_pair(norm: Norm, q: Tensor, k: Tensor, wq: Optional, wk: Optional) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(yq, yk, rstd_q, rstd_k)`` from the backend of the device. Raises ``ValueError`` as `check_pair` does."""
    if q.is_cuda and q.numel() and k.numel():
        return _triton().forward_pair(norm, q, k, wq, wk)
    check_pair(norm, q, k, wq, wk)
    yq, _, _, rstd_q = forward(norm, q, wq, None, None, False)
    yk, _, _, rstd_k = forward(norm, k, wk, None, None, False)
    return yq, yk, rstd_q, rstd_k


def _like_backward_pair(
    q: Tensor, k: Tensor, wq: Optional, wk: Optional, need_dx: bool, need_dw: bool
) -> tuple[Optional, Optional, Optional, Optional]:
    dq, dwq, _ = _like_backward(q, wq, q.dtype, need_dx, need_dw, False)
    dk, dwk, _ = _like_backward(k, wk, k.dtype, need_dx, need_dw, False)
    return dq, dk, dwq, dwk


def backward_pair(
    norm: Norm,
    dyq: Tensor,
    dyk: Tensor,
    q: Tensor,
    k: Tensor,
    wq: Optional,
    wk: Optional,
    rstd_q: Tensor,
    rstd_k: Tensor,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Optional, Optional, Optional, Optional]:
    """``(dq, dk, dwq, dwk)`` from the backend of the device."""
    if q.is_cuda and q.numel() and k.numel():
        return _triton().backward_pair(norm, rows(dyq), rows(dyk), q, k, wq, wk, rstd_q, rstd_k, need_dx, need_dw)
    dq, dwq, _ = backward(norm, dyq, q, wq, None, rstd_q, None, q.dtype, need_dx, need_dw, False)
    dk, dwk, _ = backward(norm, dyk, k, wk, None, rstd_k, None, k.dtype, need_dx, need_dw, False)
    return dq, dk, dwq, dwk


# The operators. Anyone may call a backward through the dispatcher, so its shapes are checked too.


def _check_gradients(
    norm: Norm, h: Tensor, weight: Optional, statistics: list[Optional], like_h: list[Optional]
) -> None:
    check(norm, h, weight, None, None)
    for expected, tensors in ((h.shape[:-1], statistics), (h.shape, like_h)):
        for tensor in tensors:
            if tensor is not None and (tensor.shape != expected or tensor.device != h.device):
                raise ValueError(
                    f"a backward got {tuple(tensor.shape)} on {tensor.device}; allowed is {tuple(expected)} on "
                    f"{h.device}: pass what the forward returned, and gradients of the shape of its input"
                )


@torch.library.impl("stepgraph::norm", ("cpu", "cuda"))
@launching("norm")
def _norm(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h):
    return forward(Norm(kind, eps, weight_offset, out_dtype), x, weight, bias, residual, keep_h)


@torch.library.register_fake("stepgraph::norm")
def _norm_fake(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    check(norm, x, weight, bias, residual)
    return _like_forward(norm, x, residual, keep_h)


@torch.library.impl("stepgraph::norm_backward", ("cpu", "cuda"))
@launching("norm_backward")
def _norm_backward(dy, h, weight, mean, rstd, dh, out_dtype, kind, eps, weight_offset, dx_dtype, *needs):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    _check_gradients(norm, h, weight, [mean, rstd], [dy, dh])
    mean = None if mean is None else mean.contiguous()
    return backward(norm, dy, h, weight, mean, rstd.contiguous(), dh, dx_dtype, *needs)


@torch.library.register_fake("stepgraph::norm_backward")
def _norm_backward_fake(dy, h, weight, mean, rstd, dh, out_dtype, kind, eps, weight_offset, dx_dtype, *needs):
    _check_gradients(Norm(kind, eps, weight_offset, out_dtype), h, weight, [mean, rstd], [dy, dh])
    return _like_backward(dy, weight, dx_dtype, *needs)


@torch.library.impl("stepgraph::norm_pair", ("cpu", "cuda"))
@launching("norm_pair")
def _norm_pair(q, k, wq, wk, out_dtype, kind, eps, weight_offset):
    return forward_pair(Norm(kind, eps, weight_offset, out_dtype), q, k, wq, wk)


@torch.library.register_fake("stepgraph::norm_pair")
def _norm_pair_fake(q, k, wq, wk, out_dtype, kind, eps, weight_offset):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    check_pair(norm, q, k, wq, wk)
    return _like_pair(norm, q, k)


@torch.library.impl("stepgraph::norm_pair_backward", ("cpu", "cuda"))
@launching("norm_pair_backward")
def _norm_pair_backward(dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, out_dtype, kind, eps, weight_offset, need_dx, need_dw):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    check_pair(norm, q, k, wq, wk)
    _check_gradients(norm, q, wq, [rstd_q], [dyq])
    _check_gradients(norm, k, wk, [rstd_k], [dyk])
    rstd_q, rstd_k = rstd_q.contiguous(), rstd_k.contiguous()
    return backward_pair(norm, dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, need_dx, need_dw)


@torch.library.register_fake("stepgraph::norm_pair_backward")
def _norm_pair_backward_fake(
    dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, out_dtype, kind, eps, weight_offset, need_dx, need_dw
):
    norm = Norm(kind, eps, weight_offset, out_dtype)
    check_pair(norm, q, k, wq, wk)
    _check_gradients(norm, q, wq, [rstd_q], [dyq])
    _check_gradients(norm, k, wk, [rstd_k], [dyk])
    return _like_backward_pair(q, k, wq, wk, need_dx, need_dw)

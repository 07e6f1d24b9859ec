"""The definition of a normalization for this folder, and the checks of user input.

Backends, `reference` (plain torch, any device) and `triton.single` (CUDA), have the two functions below. A row is the
last dimension of ``x``, of length ``N``; there are ``M = numel / N`` rows. A backend is never called with ``M == 0``,
and its arguments have passed `check`. ``math`` is float32, or float64 where ``x`` is (reference only).

forward(norm, x, weight, bias, residual, keep_h) -> (y, h, mean, rstd)
    x         (..., N), or (..., H, N) with per-head weights; last stride 1 (or N == 1), any other strides
    weight    None, (N,) or (H, N), any dtype independent of x; bias: None, or shape and dtype of weight
    residual  None, or shape of x with its own dtype and strides
    y         shape of x, contiguous, norm.out_dtype
    h         None without residual; else x + residual in math, rounded to residual's dtype, shape of x, contiguous. y
              is the norm of the ROUNDED h: backward reads h and must see what forward saw. None if keep_h is False.
    mean      shape x.shape[:-1], contiguous, math; None for "rms".   rstd: the same, always there.

backward(norm, dy, h, weight, mean, rstd, dh, dx_dtype, need_dx, need_dw, need_db) -> (dx, dw, db)
    dy        shape of x, last stride 1 (or N == 1), any dtype; the gradient of y
    h         what was normalized: h of forward, or x where there was no residual; any strides with last 1
    dh        None, or the gradient that comes in for h itself (prenorm), shape of x, last stride 1: added to dx
    dx        shape of x, contiguous, dx_dtype; dw, db: shape and dtype of weight, summed over rows in math
    Each of the three is None unless its flag is set. need_dw and need_db imply a weight.

Formulas, with w' = weight + weight_offset (in math; 1 where there is no weight) and g = dy * w':
    rms    rstd = 1 / sqrt(mean(h^2) + eps)           xhat = h * rstd
           dx = rstd * (g - xhat * mean(g * xhat))
    layer  rstd = 1 / sqrt(mean((h - mean)^2) + eps)  xhat = (h - mean) * rstd
           dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    both   y = xhat * w' + bias      dw = sum over rows of dy * xhat      db = sum over rows of dy
Source: Zhang and Sennrich 2019 (arXiv:1910.07467); Ba, Kiros and Hinton 2016 (arXiv:1607.06450).
"""

from typing import NamedTuple

import torch

KINDS = ("rms", "layer")

#: What x, weight, residual and output may be. Float64, for all of them, is only for the reference.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Norm(NamedTuple):
    """A normalization without its tensors; hashable and cheap to make (a frozen dataclass costs ten times as much)."""

    kind: str
    """"rms" or "layer"."""
    eps: float
    weight_offset: float
    """Added to the weight in float32: 0.0, or 1.0 for weights stored as a difference from one (Gemma)."""
    out_dtype: torch.dtype
    """Of y."""


_EPS = {torch.float64: torch.finfo(torch.float64).eps}
_EPS32 = torch.finfo(torch.float32).eps


def default_eps(dtype: torch.dtype) -> float:
    """What ``eps=None`` means to `torch.nn.RMSNorm`: the machine epsilon of the dtype computed in."""
    return _EPS.get(dtype, _EPS32)


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a norm of ``dtype`` is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_dtype(name: str, dtype: torch.dtype, like: torch.Tensor) -> None:
    if dtype in DTYPES or (dtype == like.dtype == torch.float64 and like.device.type != "cuda"):
        return
    if name == "out_dtype":
        raise ValueError(f"out_dtype is {dtype}; allowed are {_names(DTYPES)}: use one of them")
    raise ValueError(f"{name} has dtype {dtype}; allowed are {_names(DTYPES)}: convert it with {name}.to(...)")


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed is (..., N) with N >= 1: pass rows to normalize")
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} in its last dimension; allowed is 1: pass {name}.contiguous()"
        )


def _check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(
            f"{name} is on {tensor.device}, x on {x.device}; allowed is one device: move it with {name}.to(x.device)"
        )


def _check_weight(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] and not (x.dim() > 1 and weight.shape == x.shape[-2:]):
        allowed = " or ".join(str(tuple(s)) for s in (x.shape[-1:], x.shape[-2:])[: min(x.dim(), 2)])
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; allowed for x of shape {tuple(x.shape)} is {allowed}: "
            f"make the weight of the normalized size, or reshape x"
        )
    _check_dtype(name, weight.dtype, x)
    _check_device(name, weight, x)


def check(
    norm: Norm, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """Raise ``ValueError``, one line, if a backend cannot take these arguments."""
    if norm.kind not in KINDS:
        raise ValueError(f"norm kind {norm.kind!r} is unknown; allowed are 'rms' and 'layer': pass one of them")
    _check_dtype("x", x.dtype, x)
    _check_rows("x", x)
    _check_dtype("out_dtype", norm.out_dtype, x)
    if weight is not None:
        _check_weight("weight", weight, x)
    if bias is not None:
        if weight is None:
            raise ValueError("bias is given without a weight; allowed is bias with weight: pass weight=torch.ones(N)")
        if bias.shape != weight.shape or bias.dtype != weight.dtype:
            raise ValueError(
                f"bias is {tuple(bias.shape)} {bias.dtype}; allowed is what weight is, "
                f"{tuple(weight.shape)} {weight.dtype}: reshape or convert it"
            )
        _check_device("bias", bias, x)
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)}; allowed is the shape of x, {tuple(x.shape)}: "
                f"expand or reshape it"
            )
        _check_dtype("residual", residual.dtype, x)
        _check_rows("residual", residual)
        _check_device("residual", residual, x)

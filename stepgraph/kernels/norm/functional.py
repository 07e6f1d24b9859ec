"""Public functions: RMS and layer norm, q and k in one launch, fp8 output; kernels on CUDA, plain torch elsewhere.

Common to all, with ``x`` (..., N) float16, bfloat16 or float32 and any strides whose last is 1:

    weight, bias  (N,), or (H, N) per head for x (..., H, N); dtype independent of x, the same for both
    residual      shape of x, any of the three dtypes: h = x + residual, rounded to residual's dtype, is normalized
    prenorm       return h as well; its gradient is added to that of x and residual inside the backward kernel
    eps           added to the mean square or variance; None is the machine epsilon of the dtype computed in (float32)
    weight_offset added to the weight in float32; 1.0 for weights stored as a difference from one (Gemma)

Computed in float32, rounded once at the end. Gradients are bitwise reproducible, and may be differentiated again
(by torch, slowly); forward mode is not supported. Float64 works except on CUDA. Autocast has no effect: pass
``out_dtype``.
"""

from typing import NamedTuple

import torch

from stepgraph.kernels.norm import derivatives
from stepgraph.kernels.norm.spec import FP8, Norm, default_eps, described

Tensor = torch.Tensor
Optional = Tensor | None


def rms_norm(
    x: Tensor,
    weight: Optional = None,
    bias: Optional = None,
    residual: Optional = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    prenorm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias over the last dimension, h = x + residual.

    Arguments as above. Returns y, shape of x in ``out_dtype`` (that of x by default), or ``(y, h)`` with ``prenorm``;
    without a residual h is x. Raises ``ValueError`` for shapes, dtypes, devices or strides that are not allowed.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    norm = described("rms", x, eps, weight_offset, out_dtype)
    y, h, _, _ = derivatives.norm(norm, x, weight, bias, residual, prenorm)
    return (y, x if residual is None else h) if prenorm else y


def layer_norm(
    x: Tensor,
    weight: Optional = None,
    bias: Optional = None,
    residual: Optional = None,
    eps: float | None = 1e-5,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    prenorm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = (h - mean) / sqrt(var + eps) * (weight + weight_offset) + bias over the last dimension, h = x + residual.

    As `rms_norm` otherwise; the variance is the biased one.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    norm = described("layer", x, eps, weight_offset, out_dtype)
    y, h, _, _ = derivatives.norm(norm, x, weight, bias, residual, prenorm)
    return (y, x if residual is None else h) if prenorm else y


def qk_norm(
    q: Tensor,
    k: Tensor,
    wq: Optional = None,
    wk: Optional = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(q, wq), rms_norm(k, wk))`` in one launch, forward and backward.

    q (..., Hq, D) and k (..., Hk, D) have one dtype and D, and may be slices of one fused projection: no copies.
    wq, wk: both or neither, one dtype, (D,) or per head. Raises ``ValueError`` as `rms_norm` does.
    Source: Henry et al. 2020, arXiv:2010.04245.
    """
    return derivatives.norm_pair(described("rms", q, eps, weight_offset, out_dtype), q, k, wq, wk)


class Quantized(NamedTuple):
    """Rows in float8_e4m3fn, y = ``values * scale[..., None]`` up to rounding, and a carrier of their gradient.

    Autograd casts a gradient to the dtype of its tensor, so a gradient of ``values`` would be rounded to fp8, or NaN.
    Backward therefore goes through ``carrier``, zeros that represent the dequantized y (straight-through estimator):
    `dequantize` adds it. An ``autograd.Function`` that consumes values and scale, such as an fp8 matrix product, takes
    the carrier as one more input and returns the gradient of the dequantized y for it.
    """

    values: Tensor
    """(..., N) float8_e4m3fn, no gradient."""
    scale: Tensor
    """(...) float32, per row: amax / 448; no gradient."""
    carrier: Optional
    """(..., N), dtype of x, zeros that take no memory; None if no gradient is needed."""


def _norm_fp8(
    norm: Norm, x: Tensor, weight: Optional, bias: Optional, residual: Optional, prenorm: bool
) -> Quantized | tuple[Quantized, Tensor]:
    carrier, h, values, scale = derivatives.norm(norm, x, weight, bias, residual, prenorm)
    quantized = Quantized(values, scale, carrier)
    return (quantized, x if residual is None else h) if prenorm else quantized


def rms_norm_fp8(
    x: Tensor,
    weight: Optional = None,
    bias: Optional = None,
    residual: Optional = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    prenorm: bool = False,
) -> Quantized | tuple[Quantized, Tensor]:
    """`rms_norm`, quantized per row in the same pass. Returns a `Quantized`, or ``(quantized, h)`` with ``prenorm``.

    Rows are scaled by amax / 448 and saturate. Raises ``ValueError`` as `rms_norm` does.
    """
    eps = default_eps(x.dtype) if eps is None else eps
    return _norm_fp8(Norm("rms", eps, weight_offset, FP8), x, weight, bias, residual, prenorm)


def layer_norm_fp8(
    x: Tensor,
    weight: Optional = None,
    bias: Optional = None,
    residual: Optional = None,
    eps: float | None = 1e-5,
    *,
    weight_offset: float = 0.0,
    prenorm: bool = False,
) -> Quantized | tuple[Quantized, Tensor]:
    """`layer_norm`, quantized per row in the same pass; otherwise as `rms_norm_fp8`."""
    eps = default_eps(x.dtype) if eps is None else eps
    return _norm_fp8(Norm("layer", eps, weight_offset, FP8), x, weight, bias, residual, prenorm)


def dequantize(quantized: Quantized) -> Tensor:
    """``values * scale`` in the dtype of x (float32 if no gradient is needed); its gradient is that of the norm."""
    values, scale, carrier = quantized
    y = values.to(torch.float32) * scale[..., None]
    return y if carrier is None else y.to(carrier.dtype) + carrier

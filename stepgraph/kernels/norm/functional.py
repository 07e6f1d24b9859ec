"""Public functions: RMS and layer norm, the norms of q and k; kernels on CUDA, plain torch elsewhere."""

import torch

from stepgraph.kernels.norm import derivatives

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

    Computed in float32, rounded once at the end. Gradients are bitwise reproducible, and may be differentiated again
    (by torch, slowly); forward mode is not supported. Float64 works except on CUDA. Autocast has no effect: pass
    ``out_dtype``.

    Args:
        x: (..., N) float16, bfloat16 or float32, with any strides whose last is 1.
        weight, bias: (N,), or (H, N) per head for x (..., H, N); any of the three dtypes, the same for both.
        residual: shape of x, any of the three dtypes: h, rounded to the residual's dtype, is normalized.
        eps: added to the mean square; None: the machine epsilon of float32.
        weight_offset: added to the weight in float32; 1.0 for weights stored as a difference from one (Gemma).
        out_dtype: dtype of y; None: that of x.
        prenorm: return ``(y, h)``; h's gradient is added to that of x and residual inside the backward kernel.

    Returns y, of the shape of x, or ``(y, h)``; without a residual h is x.
    Raises ``ValueError`` for shapes, dtypes, devices or strides that are not allowed.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return derivatives.norm("rms", x, weight, bias, residual, eps, weight_offset, out_dtype, prenorm)


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
    return derivatives.norm("layer", x, weight, bias, residual, eps, weight_offset, out_dtype, prenorm)


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
    """``(rms_norm(q, wq), rms_norm(k, wk))`` of q (..., Hq, D) and k (..., Hk, D); weights: (D,), (H, D) or None.

    Raises ``ValueError`` as `rms_norm` does. Source: Henry et al. 2020, arXiv:2010.04245.
    """
    options = {"weight_offset": weight_offset, "out_dtype": out_dtype}
    return rms_norm(q, wq, eps=eps, **options), rms_norm(k, wk, eps=eps, **options)

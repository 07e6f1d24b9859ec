"""Public functions: RMS and layer norm, the norms of q and k; kernels on CUDA, plain torch elsewhere.

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

    Arguments as above. Returns y, shape of x in ``out_dtype`` (that of x by default), or ``(y, h)`` with ``prenorm``;
    without a residual h is x. Raises ``ValueError`` for shapes, dtypes, devices or strides that are not allowed.
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

"""The norms in plain torch, on any device: the backend for CPU tensors, and what the kernels are compared with.

The contract and the formulas are in `spec`. Every line is differentiable: second derivatives go through here.
"""

import torch

from stepgraph.kernels.norm.spec import Norm, math_dtype

Tensor = torch.Tensor
Optional = Tensor | None


def statistics(norm: Norm, h: Tensor) -> tuple[Optional, Tensor]:
    """``(mean, rstd)`` of the rows of ``h`` (..., N): shape (...), float32 (float64 for float64); no mean for "rms"."""
    h = h.to(math_dtype(h.dtype))
    if norm.kind == "rms":
        return None, (h.square().mean(-1) + norm.eps).rsqrt()
    mean = h.mean(-1)
    return mean, ((h - mean[..., None]).square().mean(-1) + norm.eps).rsqrt()


def _normalized(h: Tensor, mean: Optional, rstd: Tensor) -> Tensor:
    h = h.to(math_dtype(h.dtype))
    return (h if mean is None else h - mean[..., None]) * rstd[..., None]


def _scaled(norm: Norm, x: Tensor, weight: Optional) -> Tensor:
    return x if weight is None else x * (weight.to(x.dtype) + norm.weight_offset)


def _row_sum(per_row: Tensor, weight: Tensor) -> Tensor:
    """Sum ``per_row`` (..., N) or (..., H, N) over all but the dimensions of ``weight``."""
    return per_row.reshape(-1, *weight.shape).sum(0).to(weight.dtype)


def forward(
    norm: Norm, x: Tensor, weight: Optional, bias: Optional, residual: Optional, keep_h: bool
) -> tuple[Tensor, Optional, Optional, Tensor]:
    """``(y, h, mean, rstd)`` as the contract in `spec` says."""
    h = x
    if residual is not None:
        dtype = math_dtype(x.dtype)
        h = (x.to(dtype) + residual.to(dtype)).to(residual.dtype).contiguous()
    mean, rstd = statistics(norm, h)
    y = _scaled(norm, _normalized(h, mean, rstd), weight)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(norm.out_dtype).contiguous(), (h if residual is not None and keep_h else None), mean, rstd


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
    """``(dx, dw, db)`` as the contract in `spec` says."""
    xhat = _normalized(h, mean, rstd)
    dy = dy.to(xhat.dtype)
    dx = dw = db = None
    if need_dx:
        g = _scaled(norm, dy, weight)
        dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if norm.kind == "layer":
            dx = dx - g.mean(-1, keepdim=True)
        dx = dx * rstd[..., None]
        if dh is not None:
            dx = dx + dh.to(dx.dtype)
        dx = dx.to(dx_dtype).contiguous()
    if need_dw:
        dw = _row_sum(dy * xhat, weight)
    if need_db:
        db = _row_sum(dy, weight)
    return dx, dw, db

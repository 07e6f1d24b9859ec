"""Norms with what a cast to fp8 needs, in one kernel: ``stepgraph::norm_cast``.

    y, h, mean, rstd   those of `operators`' norm, bit for bit
    values, scale      y by rows in float8_e4m3fn and their scales: `kernels.fp8.cast.cast_scaled_rows` of y
    or scale alone     the largest magnitude of each row of y, whose largest is that of y: for one scale of all rows

A row of y is complete where the norm is computed, so that neither reads y again. It rounds to the dtype of y before it
casts. For graphs alone: it has no gradient.
"""

import torch

from stepgraph.kernels.ahead import launching
from stepgraph.kernels.fp8.cast import rows_reference
from stepgraph.kernels.norm import operators, reference
from stepgraph.kernels.norm.operators import Optional, Tensor
from stepgraph.kernels.norm.spec import FP8, Norm

torch.library.define(
    "stepgraph::norm_cast",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, {operators._NORM}, bool keep_h, bool cast)"
    " -> (Tensor y, Tensor h, Tensor mean, Tensor rstd, Tensor values, Tensor scale)",
)

Results = tuple[Tensor, Optional, Optional, Tensor, Optional, Tensor]


def in_torch(
    norm: Norm, x: Tensor, weight: Optional, bias: Optional, residual: Optional, keep_h: bool, cast: bool
) -> Results:
    """``(y, h, mean, rstd, values, scale)`` in plain torch: ``values`` (..., N) and ``scale`` (...), None for values
    that were not asked for."""
    y, h, mean, rstd = reference.forward(norm, x, weight, bias, residual, keep_h)
    if not cast:
        return y, h, mean, rstd, None, y.abs().amax(-1).float()
    q, scale, _, _ = rows_reference(y.view(-1, y.shape[-1]), FP8, True, False)
    return y, h, mean, rstd, q.view(y.shape), scale.view(y.shape[:-1])


@torch.library.impl("stepgraph::norm_cast", ("cpu", "cuda"))
@launching("norm_cast")
def _norm_cast(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h, cast) -> Results:
    norm = Norm(kind, eps, weight_offset, out_dtype)
    run = operators._triton().forward_cast if x.is_cuda else in_torch
    return run(norm, x, weight, bias, residual, keep_h, cast)


@torch.library.register_fake("stepgraph::norm_cast")
def _norm_cast_fake(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h, cast) -> Results:
    norm = Norm(kind, eps, weight_offset, out_dtype)
    y, h, mean, rstd = operators._like_forward(norm, x, residual, keep_h)
    values = torch.empty_like(y, dtype=FP8) if cast else None
    return y, h, mean, rstd, values, x.new_empty(x.shape[:-1], dtype=torch.float32)

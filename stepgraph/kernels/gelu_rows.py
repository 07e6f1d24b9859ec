"""GELU between two products, and its gradient with the sum over rows that is the gradient of the bias before it.

    gelu_rows:           a = gelu(z)
    gelu_rows_backward:  dz = da * gelu'(z),    db = the sum of dz's rows

With libdevice's erf, a compiled kernel is bound by arithmetic, not memory (on an H200 2.5 TB/s forward and 2.9
backward, of 4.2). Ours approximates erf to within 1.5e-7 from one exponential, which the gradient reuses, and computes
tanh GELU as the sigmoid that it equals. Backward sums rows while it writes them, which saves a read.
Made by the pass `gelu_kernels` after the step was traced: they have no gradients of their own.
Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, formula 7.1.26.
"""

import torch
import torch.nn.functional as F

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
aten = torch.ops.aten


def _check(z: Tensor, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r}; allowed: none, tanh, as in torch.nn.functional.gelu")
    if z.ndim == 0 or z.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"gelu_rows got {z.dtype} {tuple(z.shape)}; allowed are floating (..., N): convert or reshape")


def _check_backward(da: Tensor, z: Tensor, approximate: str, sums: bool) -> None:
    _check(z, approximate)
    if da.shape != z.shape or da.dtype != z.dtype:
        raise ValueError(
            f"gelu_rows_backward got {da.dtype} {tuple(da.shape)} for z of {z.dtype} {tuple(z.shape)}; allowed is one "
            "shape and dtype: convert or reshape"
        )


def _like_backward(da: Tensor, z: Tensor, approximate: str, sums: bool) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[-1] if sums else 0)


@operator(lambda z, _: z.new_empty(z.shape), launch="gelu_rows_triton:launch", check=_check)
def gelu_rows(z: Tensor, approximate: str) -> Tensor:
    """GELU of each element of ``z`` (..., N), floating: contiguous, on a GPU to within a rounding of fp32, 5e-7.
    ``approximate``: as in ``F.gelu``. Raises ``ValueError`` for other dtypes."""
    return F.gelu(z, approximate=approximate).contiguous()


@operator(_like_backward, launch="gelu_rows_triton:launch_backward", check=_check_backward)
def gelu_rows_backward(da: Tensor, z: Tensor, approximate: str, sums: bool) -> tuple[Tensor, Tensor]:
    """dz, contiguous, from ``da``, the gradient of GELU of ``z``, both (..., N) of one floating dtype; and with
    ``sums`` its sum over all dimensions but the last, (N,), added in fp32 in a fixed order before dz is rounded, else
    (0,). Raises ``ValueError`` for other shapes and dtypes."""
    dz = aten.gelu_backward(da, z, approximate=approximate).contiguous()
    return dz, dz.reshape(-1, z.shape[-1]).sum(0) if sums else dz.new_empty(0)

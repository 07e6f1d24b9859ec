"""Products of matrices with their own transposes, computed by one triangle.

    gram:   G = alpha x x^T + beta added

Both are symmetric, so that tiles above the diagonal are those below it, transposed: at many tiles half of the products.
The iterations that orthogonalize Muon's updates consist of such products, and of one more that is not symmetric.
Made by the pass `orthogonalize` after the step was traced: it has no gradient of its own.
Source: Lin, "Flash-Muon", 2025 (tiles of one triangle, each stored twice).
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor

#: Rows and columns of a tile of the result.
TILE = 128


def _check(x: Tensor, added: Tensor | None, beta: float, alpha: float) -> None:
    form = (*x.shape[:-1], x.shape[-2]) if x.ndim in (2, 3) else None
    if form is None or not x.is_floating_point() or (x.is_cuda and x.dtype.itemsize != 2):
        raise ValueError(
            f"gram got x of {x.dtype} {tuple(x.shape)}; allowed are floating (M, N) and (B, M, N), on a GPU in 16 "
            "bits: convert or reshape"
        )
    if added is not None and (added.dtype is not x.dtype or tuple(added.shape) != form):
        raise ValueError(
            f"gram got added of {added.dtype} {tuple(added.shape)} for x of {x.dtype} {tuple(x.shape)}; allowed is "
            f"{x.dtype} {form}: convert or reshape"
        )


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-2]))


@operator(_like, launch="gram_triton:launch", check=_check)
def gram(x: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    """``alpha x x^T + beta added``: (M, M) or (B, M, M), contiguous, on a GPU added in fp32 in a fixed order.

    x: (M, N) or (B, M, N), floating, in any strides; on a GPU of 16 bits. added: None, or of the result's shape and
    dtype, symmetric: on a GPU what lies above the diagonal is not read. Raises ``ValueError`` for other shapes and
    dtypes.
    """
    turned = x.mT
    if added is None:
        product = x @ turned
        return product if alpha == 1 else product * alpha
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    return add(added, x, turned, beta=beta, alpha=alpha).contiguous()


@register_flop_formula(torch.ops.stepgraph.gram)
def _flops(x: torch.Size, *_: object, **__: object) -> int:
    *batch, M, N = x
    tiles = -(-M // TILE)
    below = tiles * (tiles + 1) / 2 / tiles**2 if tiles else 0
    return round(2 * M * M * N * below) * (batch[0] if batch else 1)

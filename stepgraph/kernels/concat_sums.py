"""Tensors side by side in one, with the sums of its rows: the gradient of a fused projection and that of its bias.

    y = cat([a, b, c], -1),    sums = the sum of y's rows

Attention returns the gradients of queries, keys and values as three tensors; the backward products of the fused
projection need one, and its bias gradient would read that once more. Made by the pass `concat_sums` after the step was
traced: it has no gradients of its own.
"""

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor

#: Columns of a program of the kernel. On a GPU the width of each part is a multiple.
WIDTH = 128


def _check(*parts: Tensor | None) -> None:
    given = [part for part in parts if part is not None]
    first, width = given[0], WIDTH if given[0].is_cuda else 1
    alike = all(p.shape[:-1] == first.shape[:-1] and p.dtype == first.dtype for p in given)
    if not alike or first.ndim < 2 or not first.is_floating_point() or any(p.shape[-1] % width for p in given):
        raise ValueError(
            f"concat_sums got {', '.join(f'{p.dtype} {tuple(p.shape)}' for p in given)}; allowed are floating (..., N) "
            f"that differ in N alone, on a GPU multiples of {WIDTH}: reshape, convert or use torch.cat"
        )


def _like(a: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    N = sum(part.shape[-1] for part in (a, *others) if part is not None)
    return a.new_empty((*a.shape[:-1], N)), a.new_empty(N)


@operator(_like, launch="concat_sums_triton:launch", check=_check)
def concat_sums(a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """Concatenate along the last dimension, and add up rows.

    Args:
        a, b, c: (..., N_i), of one floating dtype; ``c`` may be None. On a GPU each N_i is a multiple of `WIDTH`.

    Returns:
        (..., N) with N the sum of all N_i, contiguous, and its sum over all dimensions but the last, (N,) in that
        dtype, on a GPU added in fp32 in a fixed order.

    Raises ``ValueError`` for other shapes and dtypes.
    """
    y = torch.cat([part for part in (a, b, c) if part is not None], -1).contiguous()
    return y, y.reshape(-1, y.shape[-1]).sum(0)

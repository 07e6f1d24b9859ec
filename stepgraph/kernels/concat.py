"""A concatenation whose parts Inductor writes in place in the result (see the pass `concat_in_place`)."""

from collections.abc import Sequence

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def _check(parts: Sequence[Tensor], dim: int) -> None:
    if len({(part.dtype, part.ndim) for part in parts}) != 1:
        given = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise ValueError(f"concat got {given}; allowed are tensors of one dtype and rank: convert, or use torch.cat")


def _like(parts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


@operator(_like, check=_check)
def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat(parts, dim)``, contiguous. Raises ``ValueError`` for parts of several dtypes or ranks."""
    return torch.cat(list(parts), dim).contiguous()

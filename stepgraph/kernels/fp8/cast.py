"""Casts to fp8 with a scale for a whole tensor, or for each row and each column.

    top   = max(amax |x|, 2^-100)                                    over the tensor, the row or the column
    q     = clamp(x * (most / top), -most, most), rounded to fp8     most: 448 in e4m3, 57,344 in e5m2
    scale = top / most                                               x is about q * scale

Computed in fp32, each division rounded to nearest, so that every device gives the same bits. The bound of ``top`` keeps
both quotients normal numbers, also for zeros. A NaN or an infinity in x makes what its scale covers NaN.

A product reads both of its sides along the dimension that it sums over. The side that lies across that is cast into a
transposed copy: a product of the values of x over its rows reads the *columns* of x as rows.
"""

from typing import Any

import torch

from stepgraph.kernels.fp8.formats import MOST, SMALLEST
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the scale, the factor that values are multiplied with before they are cast), both fp32 like ``amax``."""
    top = amax.clamp_min(SMALLEST)
    most = torch.full_like(top, MOST[dtype])  # as a number, some devices would multiply with its reciprocal
    return top / most, most / top


def rounded(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` in ``dtype``, contiguous; what is too large becomes the largest number."""
    return (x.float() * factor).clamp(-MOST[dtype], MOST[dtype]).to(dtype).contiguous()


def reference(x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    """`cast_scaled` in plain torch."""
    scale, factor = scale_of(amax, dtype)
    sides = (
        rounded(side, factor, dtype) if wanted else _nothing(x, dtype) for side, wanted in _sides(x, rows, columns)
    )
    return (scale, *sides)


def rows_reference(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, by: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`cast_scaled_rows` in plain torch."""
    x = x if by is None else x.float() * by
    results = []
    for side, wanted in _sides(x, rows, columns):
        scale, factor = scale_of(side.abs().amax(1).float() if wanted else x.new_empty(0).float(), dtype)
        results += [rounded(side, factor.unsqueeze(1), dtype) if wanted else _nothing(x, dtype), scale]
    return tuple(results)


def _sides(x: Tensor, rows: bool, columns: bool) -> tuple[tuple[Tensor, bool], ...]:
    return (x, rows), (x.t(), columns)


def _nothing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """For results that were not requested."""
    return x.new_empty(0, dtype=dtype)


def _forms(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Tensors for the two copies."""
    shapes = ((x.shape, rows), (x.shape[::-1], columns))
    q, transposed = (x.new_empty(shape if wanted else (0,), dtype=dtype) for shape, wanted in shapes)
    return q, transposed


def _like_rows(x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, transposed = _forms(x, *options[:3])
    row_scale, column_scale = (x.new_empty(len(side), dtype=torch.float32) for side in (q, transposed))
    return q, row_scale, transposed, column_scale


@operator(
    lambda x, amax, *options: (torch.empty_like(amax), *_forms(x, *options)),
    launch="fp8.cast_triton:launch",
)  # fmt: skip
def cast_scaled(
    x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix to fp8 with one scale: ``scale``, an fp32 scalar; ``(R, C)`` and ``(C, R)``, the transposed copy,
    both contiguous in ``dtype``; of the two, an empty tensor for one that ``rows`` or ``columns`` does not ask for.

    x: (R, C), not empty; bf16, fp16 or fp32, in any strides. amax: fp32 scalar, the largest magnitude in x:
    ``torch.linalg.vector_norm(x, inf, dtype=torch.float32)``. dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    """
    return reference(x, amax, dtype, rows, columns)


@operator(_like_rows, launch="fp8.cast_triton:launch_rows")
def cast_scaled_rows(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, by: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix to fp8 with a scale for each row, for each column, or both: ``(R, C)`` in ``dtype`` and its scales,
    (R,) fp32; ``(C, R)`` in ``dtype``, the transposed copy of what columns give, and its scales, (C,) fp32. All
    contiguous; empty tensors for what ``rows`` or ``columns`` does not ask for.

    x, dtype: as in `cast_scaled`. by: None, or (C,) fp32, contiguous: what x is multiplied by in fp32 before.
    """
    return rows_reference(x, dtype, rows, columns, by)


@operator(lambda x: x.new_empty(x.shape[::-1]), launch="fp8.transpose_triton:launch")
def transposed_bytes(x: Tensor) -> Tensor:
    """``x`` (R, C) uint8, in any strides, transposed: (C, R), contiguous, as products in fp8 need a weight for the
    gradient of their input. Torch's copy and Inductor's kernels write single bytes."""
    return x.t().clone(memory_format=torch.contiguous_format)

"""Products of expert rows in fp8, with a scale for each row of both sides.

    cast_packed_rows:          x (R, C) -> packed (R, C + TAIL): a row's values in fp8, then its scale
    grouped_scaled_mm:         y[r]  = s[r] t[e] * (rows[r] weight[e]^T)        rows r of expert e
    grouped_scaled_mm_weight:  dw[e] = s[e] t[e] * (a[:, its places] b[:, its places]^T)
    cast_scaled_groups:        x (R, C) -> its transpose in fp8 (C, R'), a scale for each expert and column

A product reads both sides along the dimension that it sums over. A weight gradient sums over an expert's rows, so both
of its sides are cast into transposed copies, each expert's part with scales of its own. There a part begins at a
multiple of 16, as a GPU needs it, and zeros fill the places up to the next: R' = R + 16 E, rounded up to 16.

As in `fp8.cast`, a NaN or an infinity makes what its scale covers NaN; rows past the last offset are not read.
On a GPU of compute capability 9 the products are torch's ``_scaled_grouped_mm``, elsewhere products in fp32.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from stepgraph import compat
from stepgraph.kernels.ahead import launching
from stepgraph.kernels.fp8.cast import rounded, rows_reference, scale_of
from stepgraph.kernels.fp8.formats import MULTIPLE, padded_rows
from stepgraph.kernels.moe.grouped import _zero_past
from stepgraph.kernels.moe.packed import E4M3, TAIL, new_packed, pack, unpack
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def padded_ends(offsets: Tensor) -> Tensor:
    """(E,) int32, where the parts of a transposed copy end."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return ((counts + MULTIPLE - 1) // MULTIPLE * MULTIPLE).cumsum(0, dtype=torch.int32)


def reference(rows: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_scaled_mm` in plain torch: sums in fp32, rounded once."""
    rows, row_scale = unpack(rows)
    out, start = row_scale.new_zeros(rows.shape[0], weight.shape[1], dtype=torch.bfloat16), 0
    for expert, end in enumerate(offsets.tolist()):
        y = rows[start:end].float() @ weight[expert].float().t()
        out[start:end] = (y * row_scale[start:end, None] * weight_scale[expert]).bfloat16()
        start = end
    return out


def weight_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """`grouped_scaled_mm_weight` in plain torch: sums in fp32, rounded once."""
    out, start = a.new_empty(len(ends), a.shape[0], b.shape[0], dtype=torch.bfloat16), 0
    for expert, end in enumerate(ends.tolist()):
        y = a[:, start:end].float() @ b[:, start:end].float().t()
        out[expert] = (y * scale_a[expert, :, None] * scale_b[expert]).bfloat16()
        start = end
    return out


def cast_reference(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cast_scaled_groups` in plain torch, without the ends."""
    if x.dtype == torch.uint8:
        values, row_scale = unpack(x)
        x = values.float() * row_scale.unsqueeze(1)
    (R, C), experts = x.shape, len(offsets)
    q = x.new_zeros(C, padded_rows(R, experts), dtype=torch.float32).to(dtype)
    scale = x.new_empty(experts, C, dtype=torch.float32)
    start = at = 0
    for expert, end in enumerate(offsets.tolist()):
        part = x[start:end].t()
        amax = part.abs().amax(1).float() if end > start else x.new_zeros(C, dtype=torch.float32)
        scale[expert], factor = scale_of(amax, dtype)
        q[:, at : at + end - start] = rounded(part, factor.unsqueeze(1), dtype)
        at += -(-(end - start) // MULTIPLE) * MULTIPLE
        start = end
    return q, scale


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)


def _new_groups(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    (R, C), experts = x.shape, len(offsets)
    C -= TAIL if x.dtype == torch.uint8 else 0
    q = x.new_empty(C, padded_rows(R, experts), dtype=dtype)
    return q, x.new_empty(experts, C, dtype=torch.float32), torch.empty_like(offsets)


@operator(
    lambda x: new_packed(x, x.shape[1]), launch="moe.scaled_triton:launch_packed",
    takes=lambda x: x.is_cuda and x.numel(),
)  # fmt: skip
def cast_packed_rows(x: Tensor) -> Tensor:
    """Cast each row to float8_e4m3fn with a scale of its own.

    Args:
        x: (R, C), bf16, fp16 or fp32, in any strides; 16 divides C.

    Returns:
        (R, C + TAIL) uint8, contiguous: a row's C values in float8_e4m3fn and its scale in fp32, as `unpack` finds
        them, of the bits of `cast_scaled_rows`; after the scale there may be anything.
    """
    return pack(*rows_reference(x, E4M3, True, False)[:2]) if x.numel() else new_packed(x, x.shape[1])


@operator(lambda rows, weight, *_: _product(rows, weight))
def grouped_scaled_mm(
    rows: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, zero_rest: bool = True
) -> Tensor:
    """Multiply the rows of each expert with its matrix, both in fp8.

    Args:
        rows: (R, D + TAIL) uint8, sorted by expert, contiguous, as `cast_packed_rows` gives them.
        weight: (E, F, D), contiguous, in float8_e4m3fn; ``weight_scale``: (E, F) fp32.
        offsets: (E,) int32, the end of each expert's rows.
        zero_rest: False leaves rows past ``offsets[-1]`` as they are in memory.

    Returns:
        (R, F), contiguous, bf16; rows past ``offsets[-1]`` are zero.
    """
    if not rows.shape[0]:
        return _product(rows, weight)
    if not rows.is_cuda:
        return reference(rows, weight, weight_scale, offsets)
    values, row_scale = unpack(rows)
    out = compat.scaled_grouped_mm(values, weight.mT, row_scale.contiguous(), weight_scale, offsets).contiguous()
    return _zero_past(out, offsets) if zero_rest else out


@launching("grouped_scaled_mm")
def _launch(rows: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """What `grouped_scaled_mm` launches in addition to the product, which needs addresses."""
    out = _product(rows, weight)
    return _zero_past(out, offsets) if zero_rest and rows.shape[0] else out


@operator(
    lambda a, b, _, __, ends: a.new_empty(len(ends), a.shape[0], b.shape[0], dtype=torch.bfloat16),
)
def grouped_scaled_mm_weight(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """Multiply the two transposed copies, expert by expert.

    Args:
        a, b: (M, R') and (N, R'), contiguous, in float8_e4m3fn, as `cast_scaled_groups` gives them.
        scale_a, scale_b: (E, M) and (E, N) fp32.
        ends: (E,) int32, where each expert's part ends, multiples of 16.

    Returns:
        (E, M, N), contiguous, bf16; zeros for an expert without rows.
    """
    if not a.is_cuda:
        return weight_reference(a, b, scale_a, scale_b, ends)
    return compat.scaled_grouped_mm(a, b.t(), scale_a.view(-1), scale_b.view(-1), ends).contiguous()


@operator(_new_groups, launch="moe.scaled_triton:launch")
def cast_scaled_groups(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the rows of experts into a transposed copy, with a scale for each expert and column.

    Args:
        x: (R, C), not empty, sorted by expert; bf16, fp16 or fp32, in any strides; or (R, C + TAIL) uint8, packed, of
            which the values times their row's scale are cast.
        offsets: (E,) int32, the end of each expert's rows.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        (C, R') in ``dtype``, R' as `padded_rows` says; (E, C) fp32, the scales; (E,) int32, where each expert's part
        ends. Past the last end there may be anything.
    """
    return (*cast_reference(x, offsets, dtype), padded_ends(offsets))


register_flop_formula(torch.ops.stepgraph.grouped_scaled_mm)(
    lambda rows_shape, weight_shape, *_, **__: 2 * rows_shape[0] * weight_shape[2] * weight_shape[1]
)
register_flop_formula(torch.ops.stepgraph.grouped_scaled_mm_weight)(
    lambda a_shape, b_shape, *_, **__: 2 * a_shape[0] * a_shape[1] * b_shape[0]
)

"""The Triton kernel of `scaled.cast_scaled_groups`.

A program has one expert and some columns: it reads the expert's rows for their largest magnitudes and again, out of the
L2 cache where they fit, for the copy. It transposes values of 16 bits, as `fp8.cast_triton` explains; where an
assembler would mix up bytes, x is transposed before.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.fp8.cast_triton import _SMALLEST, _bits, _on, _scale, _top, _transposed_before
from stepgraph.kernels.fp8.formats import MOST, MULTIPLE, padded_rows

TALL, WIDE, WARPS = 64, 64, 4

_MULTIPLE = tl.constexpr(MULTIPLE)


@triton.jit
def _groups_kernel(
    x, offsets, q, scale, C, places, row_stride, column_stride,
    EXPERTS: tl.constexpr, MOST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Columns ``program_id(1)`` of the rows of expert ``program_id(0)``."""
    expert = tl.program_id(0)
    # Where the expert's rows begin and end, and where its part of the copy begins: parts before it are padded.
    number = tl.arange(0, EXPERTS)
    before = number < expert
    ends = tl.load(offsets + number, mask=before, other=0)
    starts = tl.load(offsets + number - 1, mask=before & (number > 0), other=0)
    to = tl.sum(tl.where(before, (ends - starts + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE, 0), 0)
    begin = tl.max(ends, 0)
    end = tl.load(offsets + expert)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (column < C)[None, :]
    most = tl.zeros([TALL, WIDE], tl.int32)
    for first in tl.range(begin, end, TALL):
        row = first + tl.arange(0, TALL)
        at = row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
        most = tl.maximum(most, _bits(tl.load(x + at, mask=(row < end)[:, None] & inside, other=0.0)))
    top = _top(tl.max(most, 0), _SMALLEST)
    factor = tl.div_rn(tl.full(top.shape, MOST, tl.float32), top)
    tl.store(scale + expert * C + column, _scale(top, MOST), mask=column < C)
    stop = begin + (end - begin + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE  # the places up to the next part are zeros
    for first in tl.range(begin, stop, TALL):
        row = first + tl.arange(0, TALL)
        at = row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
        value = tl.load(x + at, mask=(row < end)[:, None] & inside, other=0.0)
        # A place without a row is zero though its column's factor may be NaN.
        y = tl.where((row < end)[:, None], value.to(tl.float32) * factor[None, :], 0.0).to(q.dtype.element_ty)
        place = to + row - begin
        into = q + column[:, None] * places + place[None, :]
        tl.store(into, tl.trans(y), mask=tl.trans((row < stop)[:, None] & inside))


def launch(x: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scaled.cast_scaled_groups`, without the ends."""
    (R, C), experts = x.shape, offsets.shape[0]
    q = x.new_empty(C, padded_rows(R, experts), dtype=dtype)
    scale = x.new_empty(experts, C, dtype=torch.float32)
    if _transposed_before(x):
        x = x.t().clone(memory_format=torch.contiguous_format).t()
    elif 1 not in x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    with _on(x):
        _groups_kernel[(experts, triton.cdiv(C, WIDE))](
            x, offsets, q, scale, C, q.shape[1], *x.stride(),
            EXPERTS=triton.next_power_of_2(experts), MOST=MOST[dtype], TALL=TALL, WIDE=WIDE, num_warps=WARPS,
        )  # fmt: skip
    return q, scale

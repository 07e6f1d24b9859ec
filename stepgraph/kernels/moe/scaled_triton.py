"""The Triton kernels of `scaled`.

Casts by expert and column: a program has one expert and some columns. It reads the expert's rows for their largest
magnitudes and again, out of the L2 cache where they fit, for the copy. Threads exchange four values of a column as one
integer of 32 bits: an assembler mixes up bytes that are exchanged alone (see `fp8.cast_triton`).
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.fp8 import cast_triton
from stepgraph.kernels.fp8.cast_triton import _SMALLEST, _bits, _scale, _top
from stepgraph.kernels.fp8.formats import MOST, MULTIPLE, padded_rows
from stepgraph.kernels.moe.packed import E4M3, new_packed, pack, unpack

#: Rows of a tile, its columns by the bytes of a value, and warps.
TALL, WIDE, WARPS = 128, {1: 128, 2: 64, 4: 64}, 8

_MULTIPLE = tl.constexpr(MULTIPLE)
_TWO = "cvt.rn.satfinite.{}x2.f32 "
#: Four values as one integer, the first in its lowest byte. Joined by shifts, some bytes of fp32 rows came out wrong on
#: an H100 (Triton 3.6).
PTX = {
    dtype: "{ .reg .b16 low, high; " + f"{two}low, $2, $1; {two}high, $4, $3; " + "mov.b32 $0, {low, high}; }"
    for dtype, two in ((torch.float8_e4m3fn, _TWO.format("e4m3")), (torch.float8_e5m2, _TWO.format("e5m2")))
}


@triton.jit
def _groups_kernel(
    x, row_scale, offsets, q, scale, stops, C, places, row_stride, column_stride, scale_stride,
    EXPERTS: tl.constexpr, MOST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns ``program_id(1)`` of the rows of expert ``program_id(0)``. ``q``: four values each. ``stops``: where the
    parts of the copy end."""
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
    most = tl.zeros([TALL, WIDE], tl.int32)
    for first in tl.range(begin, end, TALL):
        row = first + tl.arange(0, TALL)
        value = _rows(x, row_scale, None, row, end, column, C, row_stride, column_stride, scale_stride)
        most = tl.maximum(most, _bits(value))
    top = _top(tl.max(most, 0), _SMALLEST)
    factor = tl.div_rn(tl.full(top.shape, MOST, tl.float32), top)
    tl.store(scale + expert * C + column, _scale(top, MOST), mask=column < C)
    stop = begin + (end - begin + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE  # the places up to the next part are zeros
    tl.store(stops + expert, to + stop - begin, mask=tl.program_id(1) == 0)
    four = tl.arange(0, TALL // 4)
    for first in tl.range(begin, stop, TALL):
        if PTX == "":
            quad = tl.zeros([TALL // 4, WIDE], tl.int32)
            for i in tl.static_range(4):
                y = _rows(
                    x, row_scale, factor, first + 4 * four + i, end, column, C, row_stride, column_stride, scale_stride
                )
                y = y.to(tl.float8e4nv if MOST == 448.0 else tl.float8e5)
                quad |= y.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * i)
        else:
            at = first + 4 * four
            a = _rows(x, row_scale, factor, at, end, column, C, row_stride, column_stride, scale_stride)
            b = _rows(x, row_scale, factor, at + 1, end, column, C, row_stride, column_stride, scale_stride)
            c = _rows(x, row_scale, factor, at + 2, end, column, C, row_stride, column_stride, scale_stride)
            d = _rows(x, row_scale, factor, at + 3, end, column, C, row_stride, column_stride, scale_stride)
            quad = tl.inline_asm_elementwise(PTX, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
        place = tl.multiple_of((to + first - begin) // 4, 4) + four  # parts begin and end at multiples of 4 fours
        inside = (column < C)[:, None] & (place // 4 < (to + stop - begin) // 16)[None, :]
        tl.store(q + column[:, None] * (places // 4) + place[None, :], tl.trans(quad), mask=inside)


@triton.jit
def _rows(x, row_scale, factor, row, end, column, C, row_stride, column_stride, scale_stride):
    """Some columns of some rows in fp32, zeros from ``end`` on. ``row_scale``: None where values are not fp8.
    ``factor``: of each column, which may be NaN."""
    at = row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
    value = tl.load(x + at, mask=(row < end)[:, None] & (column < C)[None, :], other=0.0).to(tl.float32)
    if row_scale is not None:
        value *= tl.load(row_scale + row.to(tl.int64) * scale_stride, mask=row < end, other=0.0)[:, None]
    if factor is not None:
        value = tl.where((row < end)[:, None], value * factor[None, :], 0.0)
    return value


def launch(
    x: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `scaled.cast_scaled_groups`."""
    x, row_scale = unpack(x) if x.dtype == torch.uint8 else (x, None)
    (R, C), experts = x.shape, offsets.shape[0]
    q = x.new_empty(C, padded_rows(R, experts), dtype=dtype)
    scale, ends = x.new_empty(experts, C, dtype=torch.float32), torch.empty_like(offsets)
    if 1 not in x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    wide = WIDE[x.element_size()]
    _groups_kernel[(experts, triton.cdiv(C, wide))](
        x, row_scale, offsets, q.view(torch.int32), scale, ends, C, q.shape[1], *x.stride(),
        0 if row_scale is None else row_scale.stride(0),
        EXPERTS=triton.next_power_of_2(experts), MOST=MOST[dtype], TALL=TALL, WIDE=wide,
        PTX="" if triton.knobs.runtime.interpret else PTX[dtype], num_warps=WARPS,
    )  # fmt: skip
    return q, scale, ends


def launch_packed(x: torch.Tensor) -> torch.Tensor:
    """As `scaled.cast_packed_rows`."""
    if x.shape[1] > cast_triton.LONGEST:  # no program holds a row
        return pack(*cast_triton.launch_rows(x, E4M3, True, False)[:2])
    packed = new_packed(x, x.shape[1])
    cast_triton._cast_rows(x, *unpack(packed))
    return packed

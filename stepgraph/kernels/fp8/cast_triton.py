"""The Triton kernels of `cast`.

A column's scale is known once all rows are read, so a matrix that is cast by its columns is read twice: once for the
largest magnitudes, once for both copies. Rows alone are read once.

A tile is transposed in shared memory, as it was read or as the fp8 that it becomes: Triton chooses. The ptxas of
CUDA 12.8, shipped with Triton 3.6 and 3.7, puts a fourth to a half of the bytes in wrong places, in tiles of any size;
that of CUDA 13.0 does not (one kernel, PTX and all, on an H100). Where this would happen, a copy is transposed before
and cast by its rows.

Magnitudes are compared as the integers that their bits are. These are in the order of the numbers, with every NaN above
infinity, and a maximum of integers is the same in whatever order programs contribute to it.
"""

import contextlib
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.fp8.formats import MOST, SMALLEST

#: Tiles of (TILE, TILE) of which the largest magnitudes are found, and their warps; rows, columns and warps of tiles
#: that are cast.
TILE, WARPS = 128, 8
CAST_TALL, CAST_WIDE, CAST_WARPS = 64, 64, 2
#: The same of pairs of bf16: rows and pairs of a tile, tiles that are on their way, warps, and rows of a program.
PAIRS_ROWS, PAIRS, PAIRS_STAGES, PAIRS_WARPS, PAIRS_CHUNK = 32, 64, 3, 4, 256
#: Elements of the longest row that one program holds.
LONGEST = 16384

_SMALLEST = tl.constexpr(SMALLEST)


@triton.jit
def _bits(x):
    """The magnitudes of ``x`` as integers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _top(bits, SMALLEST: tl.constexpr):
    """The magnitudes that ``bits`` encode, tiny ones replaced by the smallest allowed; NaN stays."""
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < SMALLEST, SMALLEST, amax)


@triton.jit
def _rounded(x, top, MOST: tl.constexpr, to: tl.constexpr):
    """``x`` in fp8, its largest magnitude ``top`` as the largest number. Written as a division of equal shapes, which
    Triton needs to round to nearest. No value is clamped: a product of two rounded factors is too large by a unit in
    the last place at most, far less than fp8 rounds off. Clamping took a fifth of the kernel's time."""
    return (x.to(tl.float32) * tl.div_rn(tl.full(top.shape, MOST, tl.float32), top)).to(to)


@triton.jit
def _scale(top, MOST: tl.constexpr):
    return tl.div_rn(top, tl.full(top.shape, MOST, tl.float32))


@triton.jit
def _tile(R, C, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Rows and columns of program ``program_id(0)``'s tile, and which of its elements are inside."""
    across = tl.cdiv(C, WIDE)
    row = (tl.program_id(0) // across).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = (tl.program_id(0) % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    return row, column, (row < R)[:, None] & (column < C)[None, :]


@triton.jit
def _amax_kernel(
    x, row_bits, column_bits, R, C, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of a tile's rows and columns, into those of the matrix, which begin as zeros."""
    row, column, inside = _tile(R, C, TILE, TILE)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    bits = _bits(tl.load(x + at, mask=inside, other=0.0))
    if ROWS:
        tl.atomic_max(row_bits + row, tl.max(bits, 1), mask=row < R, sem="relaxed")
    if COLUMNS:
        tl.atomic_max(column_bits + column, tl.max(bits, 0), mask=column < C, sem="relaxed")


@triton.jit
def _amax_pairs_kernel(
    x, row_bits, column_bits, R, C, row_stride, CHUNK,
    ROWS: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_amax_kernel` for pairs of bf16, of which a row has ``C``: each in the upper half of 32 bits is what it is in
    fp32, so that nothing is converted. ``CHUNK`` rows one after another, whose columns are compared in registers."""
    across = tl.cdiv(C, PAIRS)
    column = (tl.program_id(0) % across) * PAIRS + tl.arange(0, PAIRS)
    begin = (tl.program_id(0) // across) * CHUNK
    even = tl.zeros([TILE, PAIRS], tl.int32)
    odd = tl.zeros([TILE, PAIRS], tl.int32)
    for first in tl.range(begin, tl.minimum(begin + CHUNK, R), TILE, num_stages=STAGES):
        row = first + tl.arange(0, TILE)
        at = row.to(tl.int64)[:, None] * row_stride + column[None, :]
        pair = tl.load(x + at, mask=(row < R)[:, None] & (column < C)[None, :], other=0)
        upper, lower = pair & 0x7FFF0000, (pair << 16) & 0x7FFF0000
        odd, even = tl.maximum(odd, upper), tl.maximum(even, lower)
        if ROWS:
            tl.atomic_max(row_bits + row, tl.max(tl.maximum(upper, lower), 1), mask=row < R, sem="relaxed")
    tl.atomic_max(column_bits + 2 * column, tl.max(even, 0), mask=column < C, sem="relaxed")
    tl.atomic_max(column_bits + 2 * column + 1, tl.max(odd, 0), mask=column < C, sem="relaxed")


@triton.jit
def _cast_kernel(
    x, row_bits, column_bits, q, transposed, row_scale, column_scale, R, C, row_stride, column_stride,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Both copies of a tile. ``WHOLE``: ``row_bits`` has one magnitude, which serves all rows and columns."""
    row, column, inside = _tile(R, C, TALL, WIDE)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    value = tl.load(x + at, mask=inside, other=0.0)
    row_inside, column_inside = row < R, column < C
    if WHOLE:
        whole = _top(tl.load(row_bits + tl.zeros([1], tl.int32)), _SMALLEST)
        tl.store(row_scale + tl.zeros([1], tl.int32), _scale(whole, MOST), mask=tl.program_id(0) == 0)
        y = _rounded(value, whole[:, None], MOST, q.dtype.element_ty)
        if ROWS:
            tl.store(q + row[:, None] * C + column[None, :], y, mask=inside)
        if COLUMNS:
            tl.store(transposed + column[:, None] * R + row[None, :], tl.trans(y), mask=tl.trans(inside))
    else:
        if ROWS:
            top = _top(tl.load(row_bits + row, mask=row_inside, other=0), _SMALLEST)
            y = _rounded(value, top[:, None], MOST, q.dtype.element_ty)
            tl.store(q + row[:, None] * C + column[None, :], y, mask=inside)
            tl.store(row_scale + row, _scale(top, MOST), mask=row_inside & (tl.program_id(0) % tl.cdiv(C, WIDE) == 0))
        if COLUMNS:
            top = _top(tl.load(column_bits + column, mask=column_inside, other=0), _SMALLEST)
            y = _rounded(value, top[None, :], MOST, transposed.dtype.element_ty)
            tl.store(transposed + column[:, None] * R + row[None, :], tl.trans(y), mask=tl.trans(inside))
            first = tl.program_id(0) < tl.cdiv(C, WIDE)
            tl.store(column_scale + column, _scale(top, MOST), mask=column_inside & first)


@triton.jit
def _row_kernel(
    x, by, q, scale, C, row_stride, column_stride, q_stride, scale_stride, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Row ``program_id(0)``, read once. ``by``: None, or what each of its columns is multiplied by."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_stride + column.to(tl.int64) * column_stride, mask=column < C, other=0.0)
    if by is not None:
        value = value.to(tl.float32) * tl.load(by + column, mask=column < C, other=0.0)
    top = _top(tl.max(_bits(value)[None, :], 1), _SMALLEST)
    y = _rounded(value[None, :], top[:, None], MOST, q.dtype.element_ty)
    tl.store(q + row * q_stride + column[None, :], y, mask=(column < C)[None, :])
    tl.store(scale + row * scale_stride + tl.zeros([1], tl.int32), _scale(top, MOST))


def row_configuration(C: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows that a program holds: 32 elements a thread, or 64 in the longest."""
    block = max(triton.next_power_of_2(C), 128)
    return block, min(max(block // 1024, 1), WARPS)


def launch(x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `cast.cast_scaled`."""
    scale, bits = torch.empty_like(amax), amax.view(torch.int32)
    q, transposed = _copies(x, dtype, rows, columns)
    if _transposed_before(x):
        for side, copy, wanted in ((x, q, rows), (x.t(), transposed, columns)):
            if wanted:
                _cast(_contiguous(side), bits, None, copy, copy, scale, None, WHOLE=True, ROWS=True, COLUMNS=False)
    else:
        _cast(x, bits, None, q, transposed, scale, None, WHOLE=True, ROWS=rows, COLUMNS=columns)
    return scale, q, transposed


def launch_rows(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, by: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `cast.cast_scaled_rows`."""
    if by is not None and (columns or x.shape[1] > LONGEST):
        x, by = x.float() * by, None
    q, transposed = _copies(x, dtype, rows, columns)
    scales = [x.new_empty(len(side), dtype=torch.float32) for side in (q, transposed)]
    with _on(x):
        if _transposed_before(x):
            for side, copy, scale, wanted in ((x, q, scales[0], rows), (x.t(), transposed, scales[1], columns)):
                if wanted:
                    _cast_rows(_contiguous(side), copy, scale, by)
        elif columns:
            bits = [torch.zeros(s.shape, dtype=torch.int32, device=x.device) for s in scales]
            _amax(x, *bits, ROWS=rows, COLUMNS=True)
            _cast(x, *bits, q, transposed, *scales, WHOLE=False, ROWS=rows, COLUMNS=True)
        else:
            _cast_rows(x, q, scales[0], by)
    return q, scales[0], transposed, scales[1]


def _transposed_before(x: Tensor) -> bool:
    """Whether the kernel may not transpose. Triton 3.6 transposes values of 16 bits before it rounds them."""
    return _mixes_up_bytes() and (x.element_size() > 2 or triton.__version__ >= "3.7")


@functools.cache
def _mixes_up_bytes() -> bool:
    """12.9, of Triton 3.8 and 3.9, was not tried."""
    return int(triton.knobs.nvidia.ptxas.version.split(".")[0]) < 13


def _contiguous(x: Tensor) -> Tensor:
    # `contiguous` asks a fake tensor's device for streams.
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _cast_rows(x: Tensor, q: Tensor, scale: Tensor, by: Tensor | None = None) -> None:
    """Rows alone: read once where a program holds one."""
    if x.shape[1] <= LONGEST:
        block, warps = row_configuration(x.shape[1])
        _row_kernel[(x.shape[0],)](
            x, by, q, scale, x.shape[1], *x.stride(), q.stride(0), scale.stride(0),
            MOST=MOST[q.dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        bits = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
        _amax(x, bits, bits, ROWS=True, COLUMNS=False)
        _cast(x, bits, None, q, q, scale, None, WHOLE=False, ROWS=True, COLUMNS=False)


def _amax(x: Tensor, row_bits: Tensor, column_bits: Tensor, **forms: bool) -> None:
    if forms["COLUMNS"] and _in_pairs(x):
        pairs = x.view(torch.int32)
        programs = triton.cdiv(pairs.shape[1], PAIRS) * triton.cdiv(pairs.shape[0], PAIRS_CHUNK)
        _amax_pairs_kernel[(programs,)](
            pairs, row_bits, column_bits, *pairs.shape, pairs.stride(0), PAIRS_CHUNK,
            ROWS=forms["ROWS"], TILE=PAIRS_ROWS, PAIRS=PAIRS, STAGES=PAIRS_STAGES, num_warps=PAIRS_WARPS,
        )  # fmt: skip
        return
    _amax_kernel[_tiles(x, TILE, TILE)](
        x, row_bits, column_bits, *x.shape, *x.stride(), **forms, TILE=TILE, num_warps=WARPS
    )


def _in_pairs(x: Tensor) -> bool:
    """Whether the elements of ``x`` can be read two at a time."""
    even = x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and even


def _cast(
    x: Tensor, row_bits: Tensor, column_bits: Tensor | None, q: Tensor,
    transposed: Tensor, row_scale: Tensor, column_scale: Tensor | None, **forms: bool
) -> None:  # fmt: skip
    _cast_kernel[_tiles(x, CAST_TALL, CAST_WIDE)](
        x, row_bits, column_bits, q, transposed, row_scale, column_scale, *x.shape, *x.stride(),
        **forms, MOST=MOST[q.dtype], TALL=CAST_TALL, WIDE=CAST_WIDE, num_warps=CAST_WARPS,
    )  # fmt: skip


def _copies(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool) -> list[Tensor]:
    shapes = ((x.shape, rows), (x.shape[::-1], columns))
    return [x.new_empty(shape if wanted else (0,), dtype=dtype) for shape, wanted in shapes]


def _tiles(x: Tensor, tall: int, wide: int) -> tuple[int]:
    return (triton.cdiv(x.shape[0], tall) * triton.cdiv(x.shape[1], wide),)


def _on(x: Tensor) -> contextlib.AbstractContextManager:
    """The device that ``x`` is on, for a launch."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

"""The Triton kernels of `counted`: as many programs as run at one time, each for its share of the tiles that count."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.loss.counted import BLOCK, COLUMNS, padded
from stepgraph.kernels.norm.triton import plans


class Tile(NamedTuple):
    """Rows and columns of a tile, steps of its sum and how many are loaded ahead, warps, and programs per processor."""

    rows: int
    columns: int
    step: int
    stages: int
    warps: int
    programs: int


#: Measured on an H200 for 4,480 rows, 151,936 words and 2,048 columns: 742 TFLOP/s for logits, 679 for dx and 660 for
#: dw, where cuBLAS reaches 717, 735 and 776. The second tile is for GPUs with less shared memory.
WIDE, NARROW = Tile(128, 256, 64, 4, 8, 1), Tile(128, 128, 64, 3, 4, 2)
#: Tiles of rows that follow each other, which share the columns of a matrix in the L2 cache.
_GROUP = 16
#: Parts of the sum over the vocabulary, so that there are enough tiles.
_SPLITS = 4


@triton.jit
def _rows_that_count(end, first, rows):
    """Of ``rows`` from ``first`` on, those in blocks that are computed."""
    return tl.minimum(tl.cdiv(tl.maximum(tl.load(end).to(tl.int32) - first, 0), 128) * 128, rows)


@triton.jit
def _place(tile, ms, ns, GROUP: tl.constexpr):
    """(row, column) of a tile."""
    group = tile // (GROUP * ns)
    height = tl.minimum(ms - group * GROUP, GROUP)
    inside = tile % (GROUP * ns)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _product_kernel(
    a, b, bias, out, end, first, rows, N, K, PART, A_ROW, B_ROW, B_COLUMN, OUT_ROW, OUT_PART, WIDTH,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``a b``, (rows, K) by (K, N), with zeros from column N to ``WIDTH``; sums over ``PART`` of K where SPLITS > 1.

    ``PADDED``: rows of ``a`` have a multiple of STEP columns and need no mask, which would load them one number at a
    time. ``WHOLE``: STEP divides K. ``ALIGNED``: columns of ``b`` lie next to each other, and 16 divides N.
    """
    used = _rows_that_count(end, first, rows)
    ms, ns = tl.cdiv(used, ROWS), tl.cdiv(WIDTH, COLUMNS)
    for at in tl.range(tl.program_id(0), ms * ns * SPLITS, PROGRAMS, flatten=SPLITS == 1):
        part = at % SPLITS
        m, n = _place(at // SPLITS, ms, ns, GROUP)
        row, column = m * ROWS + tl.arange(0, ROWS), n * COLUMNS + tl.arange(0, COLUMNS)
        k = part * PART + tl.arange(0, STEP)
        left = a + tl.where(row < used, row, 0).to(tl.int64)[:, None] * A_ROW + k[None, :]
        across = tl.where(column < N, column, 0)
        if ALIGNED:
            across = tl.max_contiguous(tl.multiple_of(across, 16), 16)
        right = b + k.to(tl.int64)[:, None] * B_ROW + across.to(tl.int64)[None, :] * B_COLUMN
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(part * PART, tl.minimum(part * PART + PART, K), STEP, num_stages=STAGES):
            inside = start + tl.arange(0, STEP) < K
            x = tl.load(left) if PADDED else tl.load(left, mask=inside[None, :], other=0.0)
            y = tl.load(right) if WHOLE else tl.load(right, mask=inside[:, None], other=0.0)
            total = tl.dot(x, y, total)
            left += STEP
            right += STEP * B_ROW
        if bias is not None:
            total += tl.load(bias + across).to(tl.float32)[None, :]
        total = tl.where((column < N)[None, :], total, 0.0)
        to = out + part.to(tl.int64) * OUT_PART + row.to(tl.int64)[:, None] * OUT_ROW + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(row < used)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _join_kernel(
    parts, out, end, first, rows, D, PART, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sum of the parts of a product, each (rows, D) fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = _rows_that_count(end, first, rows)
    if tl.program_id(0) * ROWS < used:
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        mask = (row < used)[:, None] & (column < D)[None, :]
        total = tl.load(parts + at, mask=mask, other=0.0)
        for part in tl.static_range(1, SPLITS):
            total += tl.load(parts + part * PART + at, mask=mask, other=0.0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_kernel(
    slopes, x, out, end, first, rows, V, D, S_ROW, X_ROW,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """``slopes^T x``, (rows, S_ROW) and (rows, D), with ``ADD`` added to ``out`` (V, D); ROWS divides S_ROW."""
    used = _rows_that_count(end, first, rows)
    ms, ns = tl.cdiv(V, ROWS), tl.cdiv(D, COLUMNS)
    tiles = ms * ns
    if ADD:
        tiles = tl.where(used > 0, tiles, 0)
    for at in tl.range(tl.program_id(0), tiles, PROGRAMS):
        m, n = _place(at, ms, ns, GROUP)
        row, column = m * ROWS + tl.arange(0, ROWS), n * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, STEP)
        left = slopes + k.to(tl.int64)[None, :] * S_ROW + row[:, None]
        right = x + k.to(tl.int64)[:, None] * X_ROW + column[None, :]
        to = out + row.to(tl.int64)[:, None] * D + column[None, :]
        mask = (row < V)[:, None] & (column < D)[None, :]
        if ADD:  # first: afterwards there would be no registers for it
            total = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        else:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, used, STEP, num_stages=STAGES):
            inside = start + k < used  # a part may end within a block
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None] & (column < D)[None, :], other=0.0)
            total = tl.dot(a, b, total)
            left += STEP * S_ROW
            right += STEP * X_ROW
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bias_kernel(slopes, out, end, first, rows, WIDTH, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of columns of ``slopes``, WIDTH of them, which COLUMNS divides."""
    used = _rows_that_count(end, first, rows)
    column, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, used, ROWS):
        row = start + k
        at = slopes + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        found = tl.load(at, mask=(row < used)[:, None], other=0.0)
        total += tl.sum(found.to(tl.float32), 0)
    tl.store(out + column, total)


def _settings(x: Tensor, tile: Tile) -> dict[str, int]:
    """The grid's size and constants of ``tile`` on the device of ``x``."""
    programs = plans.hardware_of(x).processors * tile.programs
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step, "STAGES": tile.stages, "GROUP": _GROUP,
        "PROGRAMS": programs, "num_warps": tile.warps,
    }  # fmt: skip


def _tile(x: Tensor) -> Tile:
    """The tile whose steps fit in a processor's shared memory."""
    needed = WIDE.stages * (WIDE.rows + WIDE.columns) * WIDE.step * x.itemsize
    return WIDE if plans.hardware_of(x).shared >= needed else NARROW


def launch_logits(x: Tensor, weight: Tensor, bias: Tensor | None, end: Tensor, first: int) -> Tensor:
    """As `counted.counted_logits`."""
    x = x.contiguous()
    (rows, D), V = x.shape, weight.shape[1]
    width, tile = padded(V), _tile(x)
    out = x.new_empty(rows, width)
    settings = _settings(x, tile._replace(stages=3))  # the next tile's first steps are loaded while one is stored
    whole = D % tile.step == 0
    _product_kernel[(settings["PROGRAMS"],)](
        x, weight, bias, out, end, first, rows, V, D, D + tile.step, D, *weight.stride(), width, 0, width,
        SPLITS=1, PADDED=whole, WHOLE=whole, ALIGNED=weight.stride(1) == 1 and V % 16 == 0, **settings,
    )  # fmt: skip
    return out


def launch_dx(slopes: Tensor, weight: Tensor, end: Tensor, first: int) -> Tensor:
    """As `counted.counted_dx`."""
    slopes, weight = slopes.contiguous(), weight.contiguous()
    (rows, width), (V, D) = slopes.shape, weight.shape
    out, parts = weight.new_empty(rows, D), weight.new_empty(_SPLITS, rows, D, dtype=torch.float32)
    tile = _tile(slopes)
    settings = _settings(slopes, tile)
    part = triton.cdiv(triton.cdiv(V, _SPLITS), tile.step) * tile.step
    _product_kernel[(settings["PROGRAMS"],)](
        slopes, weight, None, parts, end, first, rows, D, V, part, width, *weight.stride(), D, rows * D, D,
        SPLITS=_SPLITS, PADDED=True, WHOLE=V % tile.step == 0, ALIGNED=True, **settings,
    )  # fmt: skip
    _join_kernel[(triton.cdiv(rows, 8), triton.cdiv(D, 256))](
        parts, out, end, first, rows, D, rows * D, SPLITS=_SPLITS, ROWS=8, COLUMNS=256
    )
    return out


def launch_dw(total: Tensor, slopes: Tensor, x: Tensor, end: Tensor, first: int, add: bool) -> None:
    """As `counted.counted_dw_`."""
    slopes, x = slopes.contiguous(), x.contiguous()
    (V, D), (rows, width) = total.shape, slopes.shape
    out = total if total.is_contiguous() else total.contiguous()
    settings = _settings(x, _tile(x))
    _weight_kernel[(settings["PROGRAMS"],)](slopes, x, out, end, first, rows, V, D, width, D, ADD=add, **settings)
    if out is not total:
        total.copy_(out)


def launch_db(slopes: Tensor, end: Tensor, first: int) -> Tensor:
    """As `counted.counted_db`."""
    slopes = slopes.contiguous()
    rows, width = slopes.shape
    out = slopes.new_empty(width, dtype=torch.float32)
    _bias_kernel[(triton.cdiv(width, COLUMNS),)](slopes, out, end, first, rows, width, ROWS=BLOCK // 4, COLUMNS=COLUMNS)
    return out

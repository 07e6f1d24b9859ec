"""The products of a head over the rows whose label counts, which come first; their number is on the device.

    logits = x w^T + b        dx = slopes w        dw += slopes^T x        db = sum of slopes

of the first ``end - first`` rows, in blocks of `BLOCK`: rows past the last block are neither read nor written, and may
hold anything. Slopes must be zeros in the rest of the last block, as ``cross_entropy_`` of sorted labels leaves them.
Made by the pass `fuse_loss` after the step was traced: no operator here has a gradient.
"""

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels.operator import operator

#: Rows of a block; columns that a row of logits is padded to in memory.
BLOCK, COLUMNS = 128, 256


def fits(x: Tensor) -> bool:
    """Whether there are kernels for rows ``x`` (M, D): on a GPU of 16 bits, aligned."""
    return not x.is_cuda or (x.dtype.itemsize == 2 and x.shape[1] % 16 == 0)


def _used(rows: int, end: Tensor, first: int) -> int:
    """How many of ``rows`` are in blocks that are computed; the host reads ``end``."""
    return min(rows, math.ceil(max(int(end) - first, 0) / BLOCK) * BLOCK)


def _check(x: Tensor, *_: object) -> None:
    if not fits(x):
        raise ValueError(
            f"counted rows are {x.dtype} {tuple(x.shape)}; allowed on a GPU are 16 bits and a multiple of 16 columns: "
            "use plain products"
        )


def padded(columns: int) -> int:
    """``columns`` up to the next multiple of `COLUMNS`, as logits have them in memory."""
    return -(-columns // COLUMNS) * COLUMNS


def _check_slopes(slopes: Tensor, weight: Tensor, *_: object) -> None:
    if slopes.shape[1] != padded(weight.shape[0]):
        raise ValueError(
            f"counted slopes are {tuple(slopes.shape)} for a weight {tuple(weight.shape)}; allowed are "
            f"{padded(weight.shape[0])} columns, as counted_logits gives them: pad with zeros"
        )


@operator(
    lambda x, weight, *_: x.new_empty(x.shape[0], padded(weight.shape[1])),
    launch="loss.counted_triton:launch_logits",
    check=_check,
)
def counted_logits(x: Tensor, weight: Tensor, bias: Tensor | None, end: Tensor, first: int) -> Tensor:
    """``x @ weight + bias`` of the rows that count: (R, W), W the next multiple of `COLUMNS`, with zeros from column V
    on.

    x: (R, D), rows ``first`` to ``first + R`` of all; on a GPU bf16 or fp16, and 16 divides D. weight: (D, V) in that
    dtype; bias: (V,) or None. end: int32 scalar on the device, how many of all rows count. Raises ``ValueError`` for
    other dtypes and widths on a GPU.
    """
    used, columns = _used(len(x), end, first), weight.shape[1]
    out = x.new_empty(len(x), padded(columns))
    out[:used] = 0
    out[:used, :columns] = x[:used] @ weight if bias is None else torch.addmm(bias, x[:used], weight)
    return out


@operator(
    lambda slopes, weight, *_: slopes.new_empty(slopes.shape[0], weight.shape[1]),
    launch="loss.counted_triton:launch_dx",
    check=_check_slopes,
)
def counted_dx(slopes: Tensor, weight: Tensor, end: Tensor, first: int) -> Tensor:
    """``slopes @ weight`` of the rows that count: (R, W), as `counted_logits` gives, and (V, D) make (R, D)."""
    used, out = _used(len(slopes), end, first), slopes.new_empty(len(slopes), weight.shape[1])
    out[:used] = slopes[:used, : len(weight)] @ weight
    return out


@operator(
    lambda *_: None,
    launch="loss.counted_triton:launch_dw",
    check=lambda total, slopes, *_: _check_slopes(slopes, total),
    writes={"total"},
)
def counted_dw_(total: Tensor, slopes: Tensor, x: Tensor, end: Tensor, first: int, add: bool) -> None:
    """``slopes.T @ x`` of the rows that count, (R, W) and (R, D), written to ``total`` (V, D) or, with ``add``, added
    to it, in fp32 and rounded once. With ``add`` and no such row nothing is read or written."""
    used = _used(len(x), end, first)
    a, b = slopes[:used, : len(total)].t(), x[:used]
    total.copy_(torch.addmm(total, a, b) if add else a @ b)


@operator(
    lambda slopes, *_: slopes.new_empty(slopes.shape[1], dtype=torch.promote_types(slopes.dtype, torch.float32)),
    launch="loss.counted_triton:launch_db",
)
def counted_db(slopes: Tensor, end: Tensor, first: int) -> Tensor:
    """The sum of the ``slopes`` (R, W) of rows that count, (W,) in fp32."""
    wide = torch.promote_types(slopes.dtype, torch.float32)
    return slopes[: _used(len(slopes), end, first)].sum(0, dtype=wide)


# Multiplications and additions as `torch.utils.flop_counter` counts them, if every row counted.


@register_flop_formula([torch.ops.stepgraph.counted_logits, torch.ops.stepgraph.counted_dx])
def _rows_flops(rows: torch.Size, matrix: torch.Size, *_: object, **__: object) -> int:
    return 2 * rows[0] * matrix[0] * matrix[1]


@register_flop_formula(torch.ops.stepgraph.counted_dw_)
def _weight_flops(total: torch.Size, slopes: torch.Size, *_: object, **__: object) -> int:
    return 2 * slopes[0] * total[0] * total[1]

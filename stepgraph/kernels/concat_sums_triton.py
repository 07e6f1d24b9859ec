"""The Triton kernel of `concat_sums`: a program copies some columns of one part, rows after rows, and adds them up."""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.concat_sums import WIDTH
from stepgraph.kernels.norm.column_sum import add_rows
from stepgraph.kernels.norm.triton import plans

Tensor = torch.Tensor
#: Rows of a step, stages of loads, programs of a processor, warps.
ROWS, STAGES, PROGRAMS, WARPS = 16, 3, 4, 4


@triton.jit
def _copy(
    source: tl.tensor, y: tl.tensor, first: tl.tensor, last: tl.tensor, at: tl.tensor, to: tl.tensor,
    N: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Copy columns ``at`` of ``source``, (M, N), to columns ``to`` of ``y``, (M, WHOLE); their sums."""
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        wide, mask = row.to(tl.int64)[:, None], (row < last)[:, None]
        value = tl.load(source + wide * N + at[None, :], mask=mask, other=0.0)
        tl.store(y + wide * WHOLE + to[None, :], value, mask=mask)
        total += value.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _concat_kernel(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, y: tl.tensor, partials: tl.tensor, M: tl.tensor, rows: tl.tensor,
    NA: tl.constexpr, NB: tl.constexpr, NC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """``WIDTH`` columns of ``rows`` rows of y; their sums go to ``partials``, (programs over rows, N). ``c``: None
    where there are two parts, and ``NC`` 0."""
    N: tl.constexpr = NA + NB + NC
    ACROSS: tl.constexpr = N // WIDTH
    part = tl.program_id(0) // ACROSS
    column = tl.program_id(0) % ACROSS * WIDTH
    to = column + tl.arange(0, WIDTH)
    first = part * rows
    last = tl.minimum(first + rows, M)
    if column < NA:
        sums = _copy(a, y, first, last, to, to, NA, N, ROWS, WIDTH, STAGES)
    elif column < NA + NB:
        sums = _copy(b, y, first, last, to - NA, to, NB, N, ROWS, WIDTH, STAGES)
    else:
        sums = tl.zeros((WIDTH,), tl.float32)
        if c is not None:
            sums = _copy(c, y, first, last, to - NA - NB, to, NC, N, ROWS, WIDTH, STAGES)
    tl.store(partials + part.to(tl.int64) * N + to, sums)


def launch(a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `concat_sums.concat_sums`."""
    parts = [part if part is None else part.contiguous() for part in (a, b, c)]
    widths = [0 if part is None else part.shape[-1] for part in parts]
    N = sum(widths)
    y = a.new_empty((*a.shape[:-1], N))
    M, across = y.numel() // N, N // WIDTH
    if not M:
        return y, y.new_zeros(N)
    count = max(1, PROGRAMS * plans.hardware_of(y).processors // across)
    rows = triton.cdiv(triton.cdiv(M, count), ROWS) * ROWS
    count = triton.cdiv(M, rows)
    partials = y.new_empty((count, N), dtype=torch.float32)
    _concat_kernel[(count * across,)](
        *parts, y, partials, M, rows, *widths, ROWS=ROWS, WIDTH=WIDTH, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return y, add_rows(partials, y.dtype)

"""The Triton kernel of `gram`: a program computes a tile on or below the diagonal, and stores it on both sides."""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.gram import TILE
from stepgraph.kernels.norm.triton import plans

Tensor = torch.Tensor
#: Columns of x in a step, warps.
STEP, WARPS = 64, 8


@triton.jit
def _gram_kernel(
    x: tl.tensor, added: tl.tensor, out: tl.tensor, M: tl.tensor, N: tl.tensor, X_BATCH: tl.tensor, X_ROW: tl.tensor,
    X_COLUMN: tl.tensor, beta: tl.tensor, alpha: tl.tensor, FULL: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """``FULL``: whether tiles and steps divide M and N. Tiles are counted by rows: (0, 0), (1, 0), (1, 1), (2, 0)."""
    place, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    down = ((tl.sqrt(8.0 * place + 1.0) - 1.0) / 2.0).to(tl.int32)
    down -= (down * (down + 1) // 2 > place).to(tl.int32)  # the root is rounded
    down += ((down + 1) * (down + 2) // 2 <= place).to(tl.int32)
    across = place - down * (down + 1) // 2
    rows, columns = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    left = x + batch * X_BATCH + rows.to(tl.int64)[:, None] * X_ROW
    right = x + batch * X_BATCH + columns.to(tl.int64)[None, :] * X_ROW
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, N, STEP, num_stages=STAGES):
        k = start + tl.arange(0, STEP)
        at = k.to(tl.int64) * X_COLUMN
        if FULL:
            a = tl.load(left + at[None, :])
            b = tl.load(right + at[:, None])
        else:
            a = tl.load(left + at[None, :], mask=(rows < M)[:, None] & (k < N)[None, :], other=0.0)
            b = tl.load(right + at[:, None], mask=(k < N)[:, None] & (columns < M)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    total *= alpha
    at = batch * M * M + rows.to(tl.int64)[:, None] * M + columns[None, :]
    mask = (rows < M)[:, None] & (columns < M)[None, :]
    if added is not None:
        total += beta * tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=mask)
    if down != across:
        mirrored = batch * M * M + columns.to(tl.int64)[:, None] * M + rows[None, :]
        tl.store(out + mirrored, tl.trans(value), mask=(columns < M)[:, None] & (rows < M)[None, :])


def launch(x: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    """As `gram.gram`."""
    *batch, M, N = x.shape
    out = x.new_empty((*batch, M, M))
    if not out.numel():
        return out
    if min(x.stride()[-2:]) != 1:
        x = x.contiguous()
    tiles = triton.cdiv(M, TILE)
    stages = 4 if plans.hardware_of(x).shared >= 4 * 2 * TILE * STEP * x.itemsize else 3
    _gram_kernel[(tiles * (tiles + 1) // 2, batch[0] if batch else 1)](
        x, None if added is None else added.contiguous(), out, M, N, x.stride(0) if batch else 0, *x.stride()[-2:],
        beta, alpha, FULL=not (M % TILE or N % STEP), TILE=TILE, STEP=STEP, STAGES=stages, num_warps=WARPS,
    )  # fmt: skip
    return out

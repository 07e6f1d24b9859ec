"""The Triton kernel of `transpose`: bytes in pairs of 16 bits, which every version of Triton transposes right
(`cast_triton`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Pairs of rows and of columns of a tile, and its warps.
TALL, WIDE, WARPS = 64, 64, 8


@triton.jit
def _kernel(x, y, R, C, TALL: tl.constexpr, WIDE: tl.constexpr):
    """A tile of ``x``, of ``R`` pairs of rows and ``C`` pairs of columns: four bytes become two pairs of ``y``."""
    across = tl.cdiv(C, WIDE)
    row = (tl.program_id(0) // across).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = (tl.program_id(0) % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (row < R)[:, None] & (column < C)[None, :]
    at = x + 2 * row[:, None] * C + column[None, :]
    upper, lower = tl.load(at, mask=inside, other=0), tl.load(at + C, mask=inside, other=0)
    even = (upper & 0xFF) | (lower << 8)
    odd = ((upper >> 8) & 0xFF) | (lower & -256)
    to = y + 2 * column[:, None] * R + row[None, :]
    tl.store(to, tl.trans(even.to(tl.int16)), mask=tl.trans(inside))
    tl.store(to + R, tl.trans(odd.to(tl.int16)), mask=tl.trans(inside))


def launch(x: Tensor) -> Tensor:
    """As `transpose.transposed_bytes`."""
    R, C = x.shape
    if R % 2 or C % 2 or not x.is_contiguous() or x.storage_offset() % 2:
        return x.t().clone(memory_format=torch.contiguous_format)
    y = x.new_empty(C, R)
    tiles = triton.cdiv(R // 2, TALL) * triton.cdiv(C // 2, WIDE)
    _kernel[(tiles,)](x.view(torch.int16), y.view(torch.int16), R // 2, C // 2, TALL=TALL, WIDE=WIDE, num_warps=WARPS)
    return y

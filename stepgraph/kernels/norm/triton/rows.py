"""The addresses of a tensor's rows: any leading shape and strides become two levels, ``outer`` and ``inner``.

    row r of x starts at  (r // size) * outer + (r % size) * inner  elements

A slice of a fused QKV projection, a transposed batch and an expanded gradient need no copy. More than two levels that
do not merge (a permutation of three dimensions) are copied. A kernel is given strides divided by ``align``, the largest
power of two up to 16 that divides both, and multiplies them back: the compiler then knows their alignment and loads 16
bytes at a time.

Consecutive rows whose length is not a multiple of 16 bytes begin anywhere within 16 bytes, but every
``PERIOD``-th at the same place. A program takes rows ``PERIOD`` apart, and reads each from ``shift`` elements before
it, a multiple of ``SHIFT`` elements (16 bytes): so loads are whole vectors there too, and columns lie the same in all
of its rows. The last vector may reach past the end of a tensor, within 16 bytes that hold the tensor's last element.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rows(NamedTuple):
    """Rows of ``tensor`` with strides in units of ``align`` elements; ``size`` rows on the inner level."""

    tensor: torch.Tensor
    outer: int
    inner: int
    size: int
    align: int

    @property
    def two_levels(self) -> bool:
        """Whether there is an inner level."""
        return self.size > 1


def _merged(shape: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Levels ``(size, stride)`` of the leading dimensions, the last first, with neighbours merged where they can be."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (size * levels[-1][0], levels[-1][1])
        else:
            levels.append((size, stride))
    return levels


def rows_of(x: torch.Tensor, heads: int = 1) -> Rows:
    """Rows of ``x`` (..., N), or (..., heads, N); copied only if two levels cannot describe them, or elements of a row
    do not follow each other (autograd sends gradients that were expanded or transposed)."""
    levels = _merged(x.shape[:-1], x.stride()[:-1])
    if len(levels) > 2 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return rows_of(x.contiguous(), heads)
    if not levels:
        levels = [(1, x.shape[-1])]
    if len(levels) == 1:
        outer, inner, size = levels[0][1], 0, 1
    else:
        outer, inner, size = levels[1][1], levels[0][1], levels[0][0]
    align = math.gcd(outer, inner, 16)
    return Rows(x, outer // align, inner // align, size, align)


@triton.jit
def row_start(row, outer, inner, size, ALIGN: tl.constexpr, TWO_LEVELS: tl.constexpr):
    """First element of each row, in 64 bits."""
    if TWO_LEVELS:
        count = size.to(row.dtype)
        return ((row // count).to(tl.int64) * outer + (row % count).to(tl.int64) * inner) * ALIGN
    else:
        return row.to(tl.int64) * outer * ALIGN


@triton.jit
def rows_of_step(step, M, head, H: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr, BIG: tl.constexpr):
    """Indices of the rows of a step (one token, or ``ROWS / BH`` tokens with the same heads), and which are valid."""
    token = (step.to(tl.int64) if BIG else step) * (ROWS // BH) + tl.arange(0, ROWS) // BH
    row = token * H + head
    return row, (row < M) & (head < H)


@triton.constexpr_function
def common(N, SHIFT):
    """The greatest common divisor of a length and the elements of 16 bytes."""
    return math.gcd(N, SHIFT)


@triton.jit
def shift_of(rows_set, N: tl.constexpr, SHIFT: tl.constexpr):
    """Elements of a vector before the rows of a set."""
    AT_ONCE: tl.constexpr = common(N, SHIFT)
    return rows_set.to(tl.int32) * (N // AT_ONCE) % (SHIFT // AT_ONCE) * AT_ONCE


@triton.constexpr_function
def full_pieces(N, SLICE, SPLIT, BLOCK):
    """Pieces that lie within the row in every slice, the first ones: they need no mask for columns."""
    return max(0, N - SLICE * (SPLIT - 1)) // BLOCK


@triton.constexpr_function
def full(k, FULL, SHIFT):
    """Whether piece ``k`` lies within the row: the first one begins before a shifted row."""
    return k < FULL and (SHIFT == 1 or k > 0)


@triton.jit
def shifted(start, shift, SHIFT: tl.constexpr):
    """From where a row that begins at ``start`` is read: from a multiple of ``SHIFT`` elements."""
    if SHIFT == 1:
        return start
    else:
        return tl.multiple_of(start - shift, SHIFT)


@triton.jit
def inside(at, shift, N: tl.constexpr, SHIFT: tl.constexpr):
    """Which elements ``at``, counted from where the row is read, are the row's: decided for as many at a time as divide
    the length of rows and what is read before them."""
    if SHIFT == 1:
        return at < N
    else:
        AT_ONCE: tl.constexpr = common(N, SHIFT)
        first = at // AT_ONCE * AT_ONCE
        return (first >= shift) & (first < N + shift)


@triton.jit
def tile_mask(valid, at, shift, N: tl.constexpr, SHIFT: tl.constexpr, FULL: tl.constexpr):
    """Mask of a tile to be read: valid rows, and valid columns unless the tile is known to be full. A shifted row is
    read in whole vectors, with the elements before and after it: see `trimmed`."""
    if FULL:
        return valid[:, None]
    elif SHIFT == 1:
        return valid[:, None] & (at < N)[None, :]
    else:
        return valid[:, None] & (at // SHIFT * SHIFT < N + shift)[None, :]


@triton.jit
def kept(at, shift, N: tl.constexpr, SHIFT: tl.constexpr):
    """16 set bits where `inside`, else 16 zeros."""
    return tl.where(inside(at, shift, N, SHIFT), -1, 0).to(tl.int16)


@triton.jit
def trimmed(value, keep, SHIFT: tl.constexpr, FULL: tl.constexpr, HOLD: tl.constexpr):
    """A tile as read, with zeros outside its rows, where `kept` has none; two elements at a time where `hold` pays."""
    if FULL or SHIFT == 1:
        return value
    elif HOLD:
        keep = tl.broadcast_to(keep[None, :], value.shape)
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [value, keep], dtype=value.dtype, is_pure=True, pack=2
        )
    else:
        return tl.where(keep[None, :] != 0, value, tl.zeros_like(value))


@triton.jit
def store_tile(place, value, valid, at, shift, N: tl.constexpr, SHIFT: tl.constexpr, FULL: tl.constexpr,
               CACHE: tl.constexpr):  # fmt: skip
    """Store a tile at ``place``; of a shifted row, the vectors at its ends element by element."""
    if FULL or SHIFT == 1:
        tl.store(place, value, mask=tile_mask(valid, at, shift, N, SHIFT, FULL), cache_modifier=CACHE)
    else:
        start = at // SHIFT * SHIFT
        whole = (start >= shift) & (start + SHIFT <= N + shift)
        tl.store(place, value, mask=valid[:, None] & whole[None, :], cache_modifier=CACHE)
        ends = inside(at, shift, N, SHIFT) & ((start < shift) | (start + SHIFT > N + shift))
        tl.store(place, value, mask=valid[:, None] & ends[None, :], cache_modifier=CACHE)


@triton.jit
def hold(x, zero, HOLD: tl.constexpr):
    """``x``, as a new value to the compiler, which so cannot keep its float32 form from an earlier use.

    Between the two uses of a row only its 16-bit form stays in registers: half as many. ``zero`` is zero, which neither
    the compiler nor ptxas can know.
    """
    if HOLD:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=x.dtype, is_pure=False, pack=2
        )
    else:
        return x


@triton.jit
def widened(x, zero, HOLD: tl.constexpr):
    """``x`` in float32, from a new value as `hold` makes it; of bfloat16 by one instruction for both."""
    if HOLD and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x1044; prmt.b32 $1, $2, $4, 0x3244;", "=f,=f,r,r,r", [x, zero],
            dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return hold(x, zero, HOLD).to(tl.float32)


@triton.jit
def tied(x, w, zero):
    """``x``, which ptxas cannot use before ``w`` has arrived: so it loads ``w`` now, not just before its use.

    Both are 16-bit. The operation is ``x ^ (w & zero)``; ``zero`` as in `hold`.
    """
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0x78;", "=r,r,r,r,r", [x, w, zero], dtype=x.dtype, is_pure=False, pack=2
    )

"""The Triton kernels of `rows`.

A program takes whole tokens: it reads a token once and writes all its rows, or reads all its rows and writes the token
once. Where rows are narrow it takes several tokens.
"""

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
WARPS = 4
#: Elements of a tile: 8 a thread, 16 bytes of bf16.
TILE = 1024


@triton.jit
def _gather_kernel(x, places, rows, N, K, D, stride, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns of some tokens to the places of their slots."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < N)[:, None] & (column < D)[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    for k in range(K):
        place = tl.load(places + token * K + k, mask=token < N, other=-1)
        to = rows + place.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(to, value, mask=inside & (place >= 0)[:, None])


@triton.jit
def _zero_kernel(rows, order, R, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to the rows that are no slot's place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    empty = (row < R) & (tl.load(order + row, mask=row < R, other=0) < 0)
    if tl.max(empty.to(tl.int32), 0) > 0:
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            to = rows + row.to(tl.int64)[:, None] * D + column[None, :]
            zero = tl.zeros([ROWS, BLOCK], rows.dtype.element_ty)
            tl.store(to, zero, mask=empty[:, None] & (column < D)[None, :])


@triton.jit
def _combine_kernel(
    rows, places, weights, out, N, D, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of some tokens: the sum over their slots."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < D)[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for k in tl.static_range(K):  # unrolled: all rows are on their way at once
        place = tl.load(places + token * K + k, mask=token < N, other=-1)
        used = place >= 0
        at = rows + place.to(tl.int64)[:, None] * stride + column[None, :]
        value = tl.load(at, mask=used[:, None] & inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + token * K + k, mask=used, other=0.0).to(tl.float32)[:, None]
        total += value
    to = out + token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(token < N)[:, None] & inside)


@triton.jit
def _combine_backward_kernel(
    dy, rows, places, weights, drows, dweights, N, K, D, dy_stride, stride, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some tokens: the gradients of their rows, and of their weights, the products with the rows."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    for k in range(K):
        place = tl.load(places + token * K + k, mask=token < N, other=-1)
        used = place >= 0
        weight = tl.load(weights + token * K + k, mask=used, other=0.0).to(tl.float32)
        product = tl.zeros([TOKENS, BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = used[:, None] & (column < D)[None, :]
            at = token.to(tl.int64)[:, None] * dy_stride + column[None, :]
            grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            wide = place.to(tl.int64)[:, None]
            value = tl.load(rows + wide * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            product += grad * value
            to = drows + wide * D + column[None, :]
            tl.store(to, (grad * weight[:, None]).to(drows.dtype.element_ty), mask=inside)
        tl.store(dweights + token * K + k, tl.sum(product, 1).to(dweights.dtype.element_ty), mask=token < N)


def tile_of(elements: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile of a matrix: of the widths that leave the fewest columns of the last tile empty, the
    largest."""
    widths = (1024, 512, 256, 128) if columns > 128 else (triton.next_power_of_2(columns),)
    block = min(widths, key=lambda width: triton.cdiv(columns, width) * width)
    return elements // block, block


def configuration(D: int) -> tuple[int, int]:
    """(tokens, columns) of a tile."""
    return tile_of(TILE, D)


def _in_rows(x: Tensor) -> Tensor:
    """``x``, or a copy where the elements of a row are not contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _new_rows(like: Tensor, n_rows: int, order: Tensor | None) -> Tensor:
    """(n_rows, D), zeros in the rows that no slot uses by ``order``; without ``order``, zeros in all rows."""
    D = like.shape[1]
    if order is None:
        return like.new_zeros(n_rows, D)
    rows = like.new_empty(n_rows, D)
    if rows.numel():
        width = min(triton.next_power_of_2(D), 256)
        _zero_kernel[(triton.cdiv(n_rows, 32),)](rows, order.contiguous(), n_rows, D, ROWS=32, BLOCK=width, num_warps=8)
    return rows


def gather(x: Tensor, places: Tensor, order: Tensor | None, n_rows: int) -> Tensor:
    """As `rows.gather_rows`."""
    rows, x = _new_rows(x, n_rows, order), _in_rows(x)
    (N, K), D = places.shape, x.shape[1]
    if rows.numel() and places.numel():
        tokens, block = configuration(D)
        _gather_kernel[(triton.cdiv(N, tokens), triton.cdiv(D, block))](
            x, places.contiguous(), rows, N, K, D, x.stride(0), TOKENS=tokens, BLOCK=block, num_warps=WARPS
        )
    return rows


def combine(rows: Tensor, places: Tensor, weights: Tensor | None, order: Tensor | None = None) -> Tensor:
    """As `rows.combine_rows`."""
    rows = _in_rows(rows)
    (N, K), D = places.shape, rows.shape[1]
    out = rows.new_empty(N, D)
    if out.numel():
        tokens, block = configuration(D)
        _combine_kernel[(triton.cdiv(N, tokens), triton.cdiv(D, block))](
            rows, places.contiguous(), None if weights is None else weights.contiguous(), out, N, D, rows.stride(0),
            K=K, WEIGHTED=weights is not None, TOKENS=tokens, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def combine_backward(
    dy: Tensor, rows: Tensor, places: Tensor, weights: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `rows.combine_backward_reference`."""
    drows, dweights = _new_rows(rows, rows.shape[0], order), weights.new_empty(weights.shape)
    dy, rows = _in_rows(dy), _in_rows(rows)
    (N, K), D = places.shape, rows.shape[1]
    if places.numel():
        tokens, block = configuration(D)
        _combine_backward_kernel[(triton.cdiv(N, tokens),)](
            dy, rows, places.contiguous(), weights.contiguous(), drows, dweights, N, K, D, dy.stride(0), rows.stride(0),
            TOKENS=tokens, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
    return drows, dweights

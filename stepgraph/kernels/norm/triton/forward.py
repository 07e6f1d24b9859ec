"""The forward kernels: a block of rows is read once, held in registers, and written.

    h = x + residual       rounded to the dtype of the residual stream, and normalized as rounded
    rms                    rstd = 1 / sqrt(mean(h^2) + eps)            xhat = h * rstd
    layer                  rstd = 1 / sqrt(mean((h - mean)^2) + eps)   xhat = (h - mean) * rstd
    y = xhat * (weight + offset) + bias

A row is ``PIECES`` tiles of ``BLOCK`` columns, a power of two: 5120 is 5 x 1024, with nothing wasted. A program takes
one step of ``ROWS`` rows; only programs that share rows (see `wide`) stride over the steps. ``WEIGHT`` says when the
weight is loaded: before the rows, with them, or after their sums, from the L2 cache. A program can so hold a whole row
of up to 73,728 bfloat16 columns, which is faster than sharing it. With per-head weights (``H`` > 1) the rows of a step
are ``ROWS / BH`` tokens of ``BH`` heads. Loads are not marked evict-first: as the stores are not either, that cost up
to 6% of bandwidth at rows of 4096 and more.
Source: Zhang and Sennrich 2019 (arXiv:1910.07467); Ba, Kiros and Hinton 2016 (arXiv:1607.06450).
"""

import triton
import triton.language as tl

from stepgraph.kernels.norm.triton.rows import (
    full,
    full_pieces,
    hold,
    inside,
    kept,
    row_start,
    rows_of_step,
    shift_of,
    shifted,
    store_tile,
    tied,
    tile_mask,
    trimmed,
)
from stepgraph.kernels.norm.triton.wide import begin, collect, end, leave, publish, share_slot, words_of_group


@triton.jit
def load_weight(weight, head, at, shift, N: tl.constexpr, H: tl.constexpr, SUM: tl.constexpr, SHIFT: tl.constexpr,
                FULL: tl.constexpr):  # fmt: skip
    """One piece of the weight (or bias): (SUM, BLOCK), or (ROWS, BLOCK) where it differs per head.

    ``SUM`` rows give every thread as many elements as it has of a row. With one row the compiler lays the weight out
    over all threads in another way than the rows, and computes everything that meets it in both.
    """
    if H == 1:
        head = tl.zeros((SUM,), tl.int32)
    mask = (head < H)[:, None]
    if not FULL:
        mask = mask & inside(at, shift, N, SHIFT)[None, :]
    place = weight + head[:, None] * N + (at - shift)[None, :]
    return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def spread(w, ROWS: tl.constexpr):
    """The weight, (SUM, BLOCK), for the ROWS rows of a tile: no thread needs what another has."""
    if w.shape[0] == ROWS or w.shape[0] == 1:
        return w
    else:
        SUM: tl.constexpr = w.shape[0]
        BLOCK: tl.constexpr = w.shape[1]
        return tl.reshape(tl.broadcast_to(w[None, :, :], (ROWS // SUM, SUM, BLOCK)), (ROWS, BLOCK))


@triton.jit
def load_weights(weight, bias, head, at, shift, N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
                 PIECES: tl.constexpr, SUM: tl.constexpr, SHIFT: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """All pieces of weight and bias, where the norm has them."""
    ws = ()
    bs = ()
    for k in tl.static_range(PIECES):
        if weight is not None:
            ws = ws + (load_weight(weight, head, at + k * BLOCK, shift, N, H, SUM, SHIFT, full(k, FULL, SHIFT)),)
        if bias is not None:
            bs = bs + (load_weight(bias, head, at + k * BLOCK, shift, N, H, SUM, SHIFT, full(k, FULL, SHIFT)),)
    return ws, bs


@triton.jit
def row_piece(x_row, r_row, valid, at, shift, N: tl.constexpr, SHIFT: tl.constexpr, FULL: tl.constexpr,
              HOLD: tl.constexpr):  # fmt: skip
    """One piece of the rows to be normalized, residual added and rounded as the residual stream is."""
    mask = tile_mask(valid, at, shift, N, SHIFT, FULL)
    value = tl.load(x_row + at[None, :], mask=mask, other=0.0)
    if r_row is not None:
        r = tl.load(r_row + at[None, :], mask=mask, other=0.0)
        value = (value.to(tl.float32) + r.to(tl.float32)).to(r.dtype)
    return trimmed(value, kept(at, shift, N, SHIFT), SHIFT, FULL, HOLD)


@triton.jit
def affine(y, mu, rs, w, b, OFFSET: tl.constexpr):
    """y in float32, of one piece."""
    if mu is not None:
        y -= mu[:, None]
    y = y * rs[:, None]
    if w is not None:
        y = y * (w + OFFSET)
    if b is not None:
        y += b
    return y


@triton.jit
def sums_of_slice(hs, first, part, shift, zero, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                  PIECES: tl.constexpr, FULL: tl.constexpr, SHIFT: tl.constexpr, HOLD: tl.constexpr,
                  LAYER: tl.constexpr):  # fmt: skip
    """The slice; and of each row of it the sum, the mean, and the sum of squares about that mean (rms: of squares, in
    place of all three)."""
    SLICE: tl.constexpr = BLOCK * PIECES
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(PIECES):
        wide = hs[k].to(tl.float32)
        total += wide if LAYER else wide * wide
    share = tl.sum(total, 1)
    mu = share
    squares = share
    if LAYER:
        columns = tl.maximum(tl.minimum(N + shift, (part + 1) * SLICE) - tl.maximum(part * SLICE, shift), 1)
        mu = share / columns.to(tl.float32)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        held = ()
        for k in tl.static_range(PIECES):
            held = held + (hold(hs[k], zero, HOLD),)
            away = held[k].to(tl.float32) - mu[:, None]
            if not full(k, FULL, SHIFT):
                away = tl.where(inside(first + k * BLOCK, shift, N, SHIFT)[None, :], away, 0.0)
            total += away * away
        if SLICE >= 16384:
            hs = held  # overwrites the row: both together take too many registers
        squares = tl.sum(total, 1)
    return hs, share, mu, squares


@triton.jit
def forward_step(
    step, turn, ws, bs, x, residual, weight, bias, y, h, mean, rstd, words,
    M, x_outer, x_inner, x_size, r_outer, r_inner, r_size, eps, zero, head, part, shift,
    N: tl.constexpr, H: tl.constexpr, OFFSET: tl.constexpr,
    X_ALIGN: tl.constexpr, X_TWO: tl.constexpr, R_ALIGN: tl.constexpr, R_TWO: tl.constexpr, BIG: tl.constexpr,
    ROWS: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    PERIOD: tl.constexpr, SHIFT: tl.constexpr, SUM: tl.constexpr, HOLD: tl.constexpr, HOLD_W: tl.constexpr,
    WEIGHT: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    """The rows of one step; ``turn`` counts the steps of this program."""
    LAYER: tl.constexpr = mean is not None
    SLICE: tl.constexpr = BLOCK * PIECES
    FULL: tl.constexpr = full_pieces(N, SLICE, SPLIT, BLOCK)
    KINDS: tl.constexpr = 2 if LAYER else 1

    first = part * SLICE + tl.arange(0, BLOCK)
    row, valid = rows_of_step(step, M, head, H if PERIOD == 1 else PERIOD, ROWS, BH, BIG)
    x_row = x + shifted(row_start(row, x_outer, x_inner, x_size, X_ALIGN, X_TWO), shift, SHIFT)[:, None]
    r_row = None
    if residual is not None:
        r_row = residual + shifted(row_start(row, r_outer, r_inner, r_size, R_ALIGN, R_TWO), shift, SHIFT)[:, None]
    start = shifted(row.to(tl.int64) * N, shift, SHIFT)[:, None]
    if WEIGHT == "with":
        ws, bs = load_weights(weight, bias, head, first, shift, N, H, BLOCK, PIECES, SUM, SHIFT, FULL)
    hs = ()
    for k in tl.static_range(PIECES):
        value = row_piece(x_row, r_row, valid, first + k * BLOCK, shift, N, SHIFT, full(k, FULL, SHIFT), HOLD)
        if WEIGHT == "with" and weight is not None and HOLD and HOLD_W:
            value = tied(value, spread(ws[k], ROWS), zero)
        hs = hs + (value,)

    for k in tl.static_range(PIECES if h is not None else 0):
        at = first + k * BLOCK
        store_tile(h + start + at[None, :], hs[k], valid, at, shift, N, SHIFT, full(k, FULL, SHIFT), "")
    hs, share, middle, squares = sums_of_slice(
        hs, first, part, shift, zero, N, ROWS, BLOCK, PIECES, FULL, SHIFT, HOLD, LAYER
    )
    mu = None
    if LAYER:
        mu = middle
        if SPLIT > 1:
            # Slices have different means: each sums squares about its own.
            publish(share, share_slot(words, turn, 0, KINDS, SPLIT, ROWS, EXCHANGE), part, turn, ROWS, EXCHANGE)
            publish(squares, share_slot(words, turn, 1, KINDS, SPLIT, ROWS, EXCHANGE), part, turn, ROWS, EXCHANGE)
            sums, within = collect(words, turn, KINDS, SPLIT, ROWS, EXCHANGE)
            mu = tl.sum(sums, 0) / N
            slice_of = tl.arange(0, triton.next_power_of_2(SPLIT))
            # None for parts past the end of the row, and where there is no part.
            sizes = tl.minimum(N + shift, (slice_of + 1) * SLICE) - tl.maximum(slice_of * SLICE, shift)
            sizes = tl.maximum(sizes, 0).to(tl.float32)[:, None]
            off = sums / tl.maximum(sizes, 1.0) - mu[None, :]
            squares = tl.sum(within + off * off * sizes, 0)
    elif SPLIT > 1:
        publish(squares, share_slot(words, turn, 0, KINDS, SPLIT, ROWS, EXCHANGE), part, turn, ROWS, EXCHANGE)
        squares = tl.sum(collect(words, turn, KINDS, SPLIT, ROWS, EXCHANGE)[0], 0)
    rs = tl.rsqrt(squares / N + eps)
    y_row = y + start
    once = valid & (part == 0)
    tl.store(rstd + row, rs, mask=once)
    if LAYER:
        tl.store(mean + row, mu, mask=once)

    for k in tl.static_range(PIECES):
        at = first + k * BLOCK
        w = None
        b = None
        if WEIGHT == "after":
            if weight is not None:
                w = load_weight(weight, head, at, shift, N, H, SUM, SHIFT, full(k, FULL, SHIFT)).to(tl.float32)
            if bias is not None:
                b = load_weight(bias, head, at, shift, N, H, SUM, SHIFT, full(k, FULL, SHIFT)).to(tl.float32)
        else:
            w = hold(ws[k], zero, HOLD_W).to(tl.float32) if weight is not None else None
            b = hold(bs[k], zero, HOLD_W).to(tl.float32) if bias is not None else None
        w = spread(w, ROWS) if weight is not None else None
        b = spread(b, ROWS) if bias is not None else None
        value = affine(hold(hs[k], zero, HOLD).to(tl.float32), mu, rs, w, b, OFFSET)
        rounded = value.to(y.dtype.element_ty)
        store_tile(y_row + at[None, :], rounded, valid, at, shift, N, SHIFT, full(k, FULL, SHIFT), "")


@triton.jit
def forward_kernel(
    x, residual, weight, bias, y, h, mean, rstd, words,
    leavers_at, M, x_outer, x_inner, x_size, r_outer, r_inner, r_size, eps,
    N: tl.constexpr, H: tl.constexpr, OFFSET: tl.constexpr,
    X_ALIGN: tl.constexpr, X_TWO: tl.constexpr, R_ALIGN: tl.constexpr, R_TWO: tl.constexpr, BIG: tl.constexpr,
    ROWS: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    PERIOD: tl.constexpr, SHIFT: tl.constexpr, SUM: tl.constexpr, HOLD: tl.constexpr, HOLD_W: tl.constexpr,
    WEIGHT: tl.constexpr, EXCHANGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rows of one program: one step, or, where programs share rows, every ``P``-th step. Grid: a multiple of
    ``SPLIT * cdiv(H, BH)``, or of ``SPLIT * PERIOD``."""
    begin(DEPENDENT)
    SLICE: tl.constexpr = BLOCK * PIECES
    FULL: tl.constexpr = full_pieces(N, SLICE, SPLIT, BLOCK)
    SETS: tl.constexpr = H if PERIOD == 1 else PERIOD
    HEAD_BLOCKS: tl.constexpr = (SETS + BH - 1) // BH
    zero = (M >> 62).to(tl.int32)
    part = tl.program_id(0) % SPLIT
    group = tl.program_id(0) // SPLIT
    head = group % HEAD_BLOCKS * BH + tl.arange(0, ROWS) % BH
    shift = shift_of(group % HEAD_BLOCKS, N, SHIFT)
    first = group // HEAD_BLOCKS
    ws = ()
    bs = ()
    if SPLIT == 1 and WEIGHT != "before":
        forward_step(
            first, 0, ws, bs, x, residual, weight, bias, y, h, mean, rstd, words,
            M, x_outer, x_inner, x_size, r_outer, r_inner, r_size, eps, zero, head, part, shift,
            N, H, OFFSET, X_ALIGN, X_TWO, R_ALIGN, R_TWO, BIG,
            ROWS, BH, BLOCK, PIECES, SPLIT, PERIOD, SHIFT, SUM, HOLD, HOLD_W, WEIGHT, EXCHANGE,
        )  # fmt: skip
    else:
        P = tl.num_programs(0) // (SPLIT * HEAD_BLOCKS)
        steps = tl.cdiv(tl.cdiv(M, SETS), ROWS // BH).to(tl.int32)
        KINDS: tl.constexpr = 1 + (mean is not None)
        if SPLIT > 1:
            leavers = (words + leavers_at).to(tl.pointer_type(tl.int32), bitcast=True)
            words += group * words_of_group(steps, P, KINDS, SPLIT, ROWS, EXCHANGE)
        if WEIGHT == "before":
            at = part * SLICE + tl.arange(0, BLOCK)
            ws, bs = load_weights(weight, bias, head, at, shift, N, H, BLOCK, PIECES, SUM, SHIFT, FULL)
        for step in tl.range(first, steps, P):
            forward_step(
                step, (step - first) // P, ws, bs, x, residual, weight, bias, y, h, mean, rstd, words,
                M, x_outer, x_inner, x_size, r_outer, r_inner, r_size, eps, zero, head, part, shift,
                N, H, OFFSET, X_ALIGN, X_TWO, R_ALIGN, R_TWO, BIG,
                ROWS, BH, BLOCK, PIECES, SPLIT, PERIOD, SHIFT, SUM, HOLD, HOLD_W, WEIGHT, EXCHANGE,
            )  # fmt: skip
        if SPLIT > 1:
            leave(words, leavers + group, KINDS, SPLIT, ROWS, EXCHANGE)


@triton.jit
def sums_kernel(
    x, residual, weight, bias, y, h, mean, rstd, words,
    leavers_at, M, x_outer, x_inner, x_size, r_outer, r_inner, r_size, eps,
    N: tl.constexpr, X_ALIGN: tl.constexpr, X_TWO: tl.constexpr, R_ALIGN: tl.constexpr, R_TWO: tl.constexpr,
    BIG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    PERIOD: tl.constexpr, SHIFT: tl.constexpr, HOLD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What programs that share rows publish, found by a launch ahead of `forward_kernel` with ``EXCHANGE`` "depend"
    or "collect": the same sums of the same slices, bit for bit. Grid: a program for each slice of each step."""
    begin(DEPENDENT)
    end(DEPENDENT)
    LAYER: tl.constexpr = mean is not None
    KINDS: tl.constexpr = 2 if LAYER else 1
    SLICE: tl.constexpr = BLOCK * PIECES
    FULL: tl.constexpr = full_pieces(N, SLICE, SPLIT, BLOCK)
    zero = (M >> 62).to(tl.int32)
    part = tl.program_id(0) % SPLIT
    group = tl.program_id(0) // SPLIT
    head = group % PERIOD + tl.zeros((ROWS,), tl.int32)
    shift = shift_of(group % PERIOD, N, SHIFT)
    first = part * SLICE + tl.arange(0, BLOCK)
    row, valid = rows_of_step(group // PERIOD, M, head, PERIOD, ROWS, 1, BIG)
    x_row = x + shifted(row_start(row, x_outer, x_inner, x_size, X_ALIGN, X_TWO), shift, SHIFT)[:, None]
    r_row = None
    if residual is not None:
        r_row = residual + shifted(row_start(row, r_outer, r_inner, r_size, R_ALIGN, R_TWO), shift, SHIFT)[:, None]
    hs = ()
    for k in tl.static_range(PIECES):
        hs = hs + (row_piece(x_row, r_row, valid, first + k * BLOCK, shift, N, SHIFT, full(k, FULL, SHIFT), HOLD),)
    hs, share, _, squares = sums_of_slice(
        hs, first, part, shift, zero, N, ROWS, BLOCK, PIECES, FULL, SHIFT, HOLD, LAYER
    )
    words += group * words_of_group(1, 1, KINDS, SPLIT, ROWS, "publish")
    if LAYER:
        publish(share, share_slot(words, part * 0, 0, KINDS, SPLIT, ROWS, "publish"), part, part * 0, ROWS, "publish")
    slot = share_slot(words, part * 0, KINDS - 1, KINDS, SPLIT, ROWS, "publish")
    publish(squares, slot, part, part * 0, ROWS, "publish")

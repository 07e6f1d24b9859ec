"""The backward kernels: dx, and the sums over rows for dw and db, from one pass over memory.

    xhat = (h - mean) * rstd  (mean 0 for rms)       g = dy * (weight + offset)
    rms    dx = rstd * (g - xhat * mean(g * xhat)) + dh
    layer  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh
    dw = sum over rows of dy * xhat                  db = sum over rows of dy

A fixed number of programs stride over blocks of rows. The loads of the next blocks are in flight (asynchronous copies
to shared memory, ``STAGES`` deep) while one block is processed, and dw and db accumulate in registers. The programs'
sums are added up in a fixed order: see `partials`. Tiles, heads and slices of rows are as in `forward`.
Source: the derivatives of Zhang and Sennrich 2019 (arXiv:1910.07467) and Ba, Kiros and Hinton 2016 (arXiv:1607.06450).
"""

import triton
import triton.language as tl

from stepgraph.kernels.norm.triton.forward import load_weight, spread
from stepgraph.kernels.norm.triton.rows import (
    full,
    full_pieces,
    inside,
    kept,
    row_start,
    rows_of_step,
    shift_of,
    shifted,
    store_tile,
    tile_mask,
    trimmed,
    widened,
)
from stepgraph.kernels.norm.triton.wide import begin, collect, end, leave, publish, share_slot, words_of_group


@triton.jit
def add_pairs(a, b, c, d):
    """Sum of two pairs: both row sums of a layer norm in one reduction."""
    return a + c, b + d


@triton.jit
def scaled(d, w, OFFSET: tl.constexpr):
    """g of one piece; all in float32."""
    if w is not None:
        return d * (w + OFFSET)
    else:
        return d


@triton.jit
def fold_rows(value, SUM: tl.constexpr):
    """The rows of a tile added up to ``SUM`` rows: those held by one thread, so that threads exchange nothing."""
    if value.shape[0] == SUM:
        return value
    else:
        return tl.sum(tl.reshape(value, (value.shape[0] // SUM, SUM, value.shape[1])), 0)


@triton.jit
def store_sums(sums, out, head_block, part, shift, N: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
               BLOCK: tl.constexpr, PIECES: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """Add the rows of the tiles of this program that share a head, and store (BH, columns of this part) at ``out``."""
    head = head_block * BH + tl.arange(0, BH)
    for k in tl.static_range(PIECES):
        at = part * (BLOCK * PIECES) + k * BLOCK + tl.arange(0, BLOCK)
        tile = sums[k]
        tile = fold_rows(tile, BH)
        place = out + head[:, None] * N + (at - shift)[None, :]
        mask = (head < H)[:, None] & inside(at, shift, N, SHIFT)[None, :]
        tl.store(place, tile.to(out.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy, h, weight, mean, rstd, dh, dx, dw, db, partials, words,
    leavers_at, M, d_outer, d_inner, d_size, h_outer, h_inner, h_size, g_outer, g_inner, g_size,
    N: tl.constexpr, H: tl.constexpr, OFFSET: tl.constexpr,
    D_ALIGN: tl.constexpr, D_TWO: tl.constexpr, H_ALIGN: tl.constexpr, H_TWO: tl.constexpr,
    G_ALIGN: tl.constexpr, G_TWO: tl.constexpr, BIG: tl.constexpr,
    ROWS: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    PERIOD: tl.constexpr, SHIFT: tl.constexpr, STAGES: tl.constexpr, HOLD_D: tl.constexpr, HOLD_H: tl.constexpr,
    HOLD_W: tl.constexpr, SUM: tl.constexpr, EXCHANGE: tl.constexpr, DIRECT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rows of one program, and its contribution to the sums over rows. Grid: a multiple of
    ``SPLIT * cdiv(H, BH)``, or of ``SPLIT * PERIOD``."""
    begin(DEPENDENT)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    LAYER: tl.constexpr = mean is not None
    SLICE: tl.constexpr = BLOCK * PIECES
    FULL: tl.constexpr = full_pieces(N, SLICE, SPLIT, BLOCK)
    SETS: tl.constexpr = H if PERIOD == 1 else PERIOD
    HEAD_BLOCKS: tl.constexpr = (SETS + BH - 1) // BH
    KINDS: tl.constexpr = 2 if LAYER else 1
    EXCHANGED: tl.constexpr = SPLIT > 1 and dx is not None

    part = program % SPLIT
    head_block = program // SPLIT % HEAD_BLOCKS
    group = program // SPLIT
    p = group // HEAD_BLOCKS
    P = programs // (SPLIT * HEAD_BLOCKS)
    steps = tl.cdiv(tl.cdiv(M, SETS), ROWS // BH).to(tl.int32)
    shift = shift_of(head_block, N, SHIFT)
    zero = (M >> 62).to(tl.int32)
    head = head_block * BH + tl.arange(0, ROWS) % BH
    first_at = part * SLICE + tl.arange(0, BLOCK)
    if EXCHANGED:
        leavers = (words + leavers_at).to(tl.pointer_type(tl.int32), bitcast=True)
        shares = words + group * words_of_group(steps, P, KINDS, SPLIT, ROWS, EXCHANGE)

    ws = ()
    keeps = ()
    dws = ()
    dbs = ()
    for k in tl.static_range(PIECES):
        if weight is not None:
            ws = ws + (load_weight(weight, head, first_at + k * BLOCK, shift, N, H, SUM, SHIFT, full(k, FULL, SHIFT)),)
        keeps = keeps + (kept(first_at + k * BLOCK, shift, N, SHIFT),)
        dws = dws + (tl.zeros((SUM, BLOCK), tl.float32),)
        dbs = dbs + (tl.zeros((SUM, BLOCK), tl.float32),)

    # The previous step's tile, which waits for the other programs' shares (SPLIT > 1): zeros at first.
    last_ds = ()
    last_hs = ()
    for _ in tl.static_range(PIECES):
        last_ds = last_ds + (tl.zeros((ROWS, BLOCK), dy.dtype.element_ty),)
        last_hs = last_hs + (tl.zeros((ROWS, BLOCK), h.dtype.element_ty),)
    last_rs = tl.zeros((ROWS,), tl.float32)
    last_mu = tl.zeros((ROWS,), tl.float32)

    for step in tl.range(p, steps + (P if EXCHANGED else 0), P, num_stages=STAGES):
        row, valid = rows_of_step(step, M, head, SETS, ROWS, BH, BIG)
        d_row = dy + shifted(row_start(row, d_outer, d_inner, d_size, D_ALIGN, D_TWO), shift, SHIFT)[:, None]
        h_row = h + shifted(row_start(row, h_outer, h_inner, h_size, H_ALIGN, H_TWO), shift, SHIFT)[:, None]
        rs = tl.load(rstd + row, mask=valid, other=0.0)
        mu = tl.load(mean + row, mask=valid, other=0.0) if LAYER else None
        lift = -mu * rs if LAYER else None
        ds = ()
        hs = ()
        next_dws = ()
        next_dbs = ()
        along = tl.zeros((ROWS, BLOCK), tl.float32)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in tl.static_range(PIECES):
            at = first_at + k * BLOCK
            mask = tile_mask(valid, at, shift, N, SHIFT, full(k, FULL, SHIFT))
            hk = tl.load(h_row + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            dk = tl.load(d_row + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            hk = trimmed(hk, keeps[k], SHIFT, full(k, FULL, SHIFT), HOLD_H)
            dk = trimmed(dk, keeps[k], SHIFT, full(k, FULL, SHIFT), HOLD_D)
            hs = hs + (hk,)
            ds = ds + (dk,)
            d = dk.to(tl.float32)
            xhat = hk.to(tl.float32) * rs[:, None]
            if LAYER:
                xhat += lift[:, None]
            if dw is not None:
                next_dws = next_dws + (dws[k] + fold_rows(d * xhat, SUM),)
            if db is not None:
                next_dbs = next_dbs + (dbs[k] + fold_rows(d, SUM),)
            w = spread(widened(ws[k], zero, HOLD_W), ROWS) if weight is not None else None
            g = scaled(d, w, OFFSET)
            along += g * xhat
            if LAYER:
                total += g
        if dw is not None:
            dws = next_dws
        if db is not None:
            dbs = next_dbs

        if dx is not None:
            if LAYER:
                c1, c2 = tl.reduce((along, total), 1, add_pairs)
            else:
                c1 = tl.sum(along, 1)
            done_ds = ds
            done_hs = hs
            done_rs = rs
            done_mu = mu
            done_row = row
            done_valid = valid
            if EXCHANGED:
                # Publish the sums of this tile, and finish the one before: its shares have had a step to arrive.
                turn = (step - p) // P
                publish(c1, share_slot(shares, turn, 0, KINDS, SPLIT, ROWS, EXCHANGE), part, turn, ROWS, EXCHANGE)
                if LAYER:
                    publish(c2, share_slot(shares, turn, 1, KINDS, SPLIT, ROWS, EXCHANGE), part, turn, ROWS, EXCHANGE)
                first_kind, last_kind = collect(shares, turn - 1, KINDS, SPLIT, ROWS, EXCHANGE)
                c1 = tl.sum(first_kind, 0)
                if LAYER:
                    c2 = tl.sum(last_kind, 0)
                done_ds = last_ds
                done_hs = last_hs
                done_rs = last_rs
                done_mu = last_mu if LAYER else None
                done_row, done_valid = rows_of_step(step - P, M, head, SETS, ROWS, BH, BIG)
                done_valid = done_valid & (turn > 0)
                last_ds = ds
                last_hs = hs
                last_rs = rs
                last_mu = mu if LAYER else last_mu
            slope = (c1 / N) * done_rs * done_rs
            level = (c2 / N) * done_rs - done_mu * slope if LAYER else None
            for k in tl.static_range(PIECES):
                at = first_at + k * BLOCK
                w = spread(widened(ws[k], zero, HOLD_W), ROWS) if weight is not None else None
                g = scaled(widened(done_ds[k], zero, HOLD_D), w, OFFSET)
                away = widened(done_hs[k], zero, HOLD_H) * slope[:, None]
                if LAYER:
                    away += level[:, None]
                value = g * done_rs[:, None] - away
                if dh is not None:
                    g_start = row_start(done_row, g_outer, g_inner, g_size, G_ALIGN, G_TWO)
                    g_row = dh + shifted(g_start, shift, SHIFT)[:, None]
                    mask = tile_mask(done_valid, at, shift, N, SHIFT, full(k, FULL, SHIFT))
                    more = tl.load(g_row + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
                    value += more.to(tl.float32)
                # Streamed, since the loads are marked evict-first: marking only one side cost bandwidth in forward.
                place = dx + shifted(done_row.to(tl.int64) * N, shift, SHIFT)[:, None] + at[None, :]
                value = value.to(dx.dtype.element_ty)
                store_tile(place, value, done_valid, at, shift, N, SHIFT, full(k, FULL, SHIFT), ".cs")

    # No sooner: programs of the next launch would take the place of some of these.
    end(DEPENDENT)
    if EXCHANGED:
        leave(shares, leavers + group, KINDS, SPLIT, ROWS, EXCHANGE)

    # Programs of one period hold sums of the same columns: to the programs that add, they are like any others.
    slot = p if PERIOD == 1 else group
    sum_block = head_block if PERIOD == 1 else 0
    if DIRECT:
        if dw is not None:
            store_sums(dws, dw, sum_block, part, shift, N, H, BH, BLOCK, PIECES, SHIFT)
        if db is not None:
            store_sums(dbs, db, sum_block, part, shift, N, H, BH, BLOCK, PIECES, SHIFT)
    elif dw is not None or db is not None:
        PLANES: tl.constexpr = 2 if dw is not None and db is not None else 1
        size = H * N
        pitch = (size + 3) // 4 * 4
        mine = partials + slot.to(tl.int64) * (pitch * PLANES)
        if dw is not None:
            store_sums(dws, mine, sum_block, part, shift, N, H, BH, BLOCK, PIECES, SHIFT)
        if db is not None:
            store_sums(dbs, mine + (PLANES - 1) * pitch, sum_block, part, shift, N, H, BH, BLOCK, PIECES, SHIFT)

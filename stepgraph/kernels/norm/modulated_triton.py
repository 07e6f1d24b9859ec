"""The Triton kernels of `modulated`.

A program takes consecutive tokens of one sequence, whole rows, and holds its sums over tokens in registers; loads of
the next rows are in flight meanwhile. A second kernel adds up the sums of a sequence's programs in their order.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.norm.triton import plans
from stepgraph.kernels.norm.triton.backward import add_pairs

Tensor = torch.Tensor
#: Bytes of a tile of one tensor, its rows at most, stages of loads, programs of a processor, least tokens of a program.
TILE, ROWS, STAGES, PROGRAMS, LEAST = 4096, 2, 3, 2, 16
#: Columns, and the most partial sums, that a program of the second kernel loads at once.
WIDTH, AT_ONCE = 64, 64


@triton.jit
def _backward_kernel(
    dy, x, mean, rstd, scale, dh, branch, gate, dx, dbranch, partials,
    offset, T, tokens, parts, scale_stride, gate_stride,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``tokens`` rows of sequence ``program_id(0) // parts``; its sums go to ``partials[program_id(0)]``, each (N,)."""
    program = tl.program_id(0)
    sequence = program // parts
    first = program % parts * tokens
    last = tl.minimum(first + tokens, T)
    at = tl.arange(0, BLOCK)
    inside = at < N
    w = tl.load(scale + sequence.to(tl.int64) * scale_stride + at, mask=inside, other=0.0).to(tl.float32) + offset
    if gate is not None:
        by = tl.load(gate + sequence.to(tl.int64) * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    dscale = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    dgate = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        valid = row < last
        token = sequence.to(tl.int64) * T + row
        mask = valid[:, None] & inside[None, :]
        place = token[:, None] * N + at[None, :]
        d = tl.load(dy + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        h = tl.load(x + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        mu = tl.load(mean + token, mask=valid, other=0.0).to(tl.float32)
        rs = tl.load(rstd + token, mask=valid, other=0.0).to(tl.float32)
        xhat = (h - mu[:, None]) * rs[:, None]
        g = d * w[None, :]
        dscale += tl.sum(d * xhat, 0)
        dshift += tl.sum(d, 0)
        along, level = tl.reduce((g * xhat, g), 1, add_pairs)
        value = (g - (level / N)[:, None] - xhat * (along / N)[:, None]) * rs[:, None]
        if dh is not None:
            value += tl.load(dh + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx + place, value.to(dx.dtype.element_ty), mask=mask, cache_modifier=".cs")
        if gate is not None:
            b = tl.load(branch + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dgate += tl.sum(value * b, 0)
            part = value * by[None, :]
            dbias += tl.sum(part, 0)
            tl.store(dbranch + place, part.to(dbranch.dtype.element_ty), mask=mask, cache_modifier=".cs")
    SUMS: tl.constexpr = 2 if gate is None else 4
    mine = partials + program.to(tl.int64) * (SUMS * N) + at
    tl.store(mine, dscale, mask=inside)
    tl.store(mine + N, dshift, mask=inside)
    if gate is not None:
        tl.store(mine + 2 * N, dgate, mask=inside)
        tl.store(mine + 3 * N, dbias, mask=inside)


@triton.jit
def _total(partials, out, first, parts, at, inside, plane, stride, N, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr):
    """The sums ``plane`` of ``parts`` programs from ``first`` on, added up at columns ``at``."""
    total = tl.zeros((AT_ONCE, WIDTH), tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        place = partials + (first + part).to(tl.int64)[:, None] * stride + plane * N + at[None, :]
        total += tl.load(place, mask=(part < parts)[:, None] & inside[None, :], other=0.0)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(partials, dscale, dshift, dgate, dbias, parts, N, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr):
    """Columns ``program_id(1)`` of all sums of sequence ``program_id(0)``, or of ``dbias`` after the last one."""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    SUMS: tl.constexpr = 2 if dgate is None else 4
    mine = sequence.to(tl.int64) * N
    if dgate is None:
        _total(partials, dscale + mine, sequence * parts, parts, at, at < N, 0, SUMS * N, N, AT_ONCE, WIDTH)
        _total(partials, dshift + mine, sequence * parts, parts, at, at < N, 1, SUMS * N, N, AT_ONCE, WIDTH)
    elif sequence < tl.num_programs(0) - 1:
        _total(partials, dscale + mine, sequence * parts, parts, at, at < N, 0, SUMS * N, N, AT_ONCE, WIDTH)
        _total(partials, dshift + mine, sequence * parts, parts, at, at < N, 1, SUMS * N, N, AT_ONCE, WIDTH)
        _total(partials, dgate + mine, sequence * parts, parts, at, at < N, 2, SUMS * N, N, AT_ONCE, WIDTH)
    else:
        _total(partials, dbias, 0, sequence * parts, at, at < N, 3, SUMS * N, N, AT_ONCE, WIDTH)


def tile_of(N: int, size: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of numbers of ``size`` bytes, and warps: a thread has 8 columns."""
    block = triton.next_power_of_2(N)
    return min(ROWS, max(1, TILE // (block * size))), block, min(16, max(1, block // 256))


def parts_of(sequences: int, tokens: int, processors: int) -> int:
    """Into how many parts to cut each sequence."""
    wanted = max(1, PROGRAMS * processors // sequences)
    return min(1 << wanted.bit_length() - 1, max(1, tokens // LEAST))


def launch(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, offset: float, dh: Tensor | None,
    branch: Tensor | None = None, gate: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `modulated.modulated_norm_backward`, or with ``gate`` as `modulated.gated_norm_backward`."""
    B, T, N = x.shape
    dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
    dh, branch = (t if t is None else t.contiguous() for t in (dh, branch))
    scale, gate = (t if t is None or t.stride(2) == 1 else t.contiguous() for t in (scale, gate))
    dx, sums = torch.empty_like(x), [x.new_empty((B, 1, N), dtype=scale.dtype) for _ in range(2)]
    dbranch = dgate = dbias = None
    if gate is not None:
        dbranch, dgate = torch.empty_like(branch), x.new_empty((B, 1, N), dtype=gate.dtype)
        dbias = x.new_empty(N, dtype=branch.dtype)
    if x.numel():
        parts = parts_of(B, T, plans.hardware_of(x).processors)
        tokens = triton.cdiv(T, parts)
        rows, block, warps = tile_of(N, max(t.element_size() for t in (dy, x, dh, branch) if t is not None))
        partials = x.new_empty((B * parts, 2 if gate is None else 4, N), dtype=torch.float32)
        strides = scale.stride(0), 0 if gate is None else gate.stride(0)
        _backward_kernel[(B * parts,)](
            dy, x, mean, rstd, scale, dh, branch, gate, dx, dbranch, partials, float(offset), T, tokens, parts,
            *strides, N=N, ROWS=rows, BLOCK=block, STAGES=STAGES, num_warps=warps,
        )  # fmt: skip
        at_once = min(triton.next_power_of_2(parts), AT_ONCE)
        grid = B + (gate is not None), triton.cdiv(N, WIDTH)
        _add_kernel[grid](partials, *sums, dgate, dbias, parts, N, AT_ONCE=at_once, WIDTH=WIDTH, num_warps=2)
    else:
        for each in (*sums, *(t for t in (dgate, dbias) if t is not None)):
            each.zero_()
    return (dx, *sums) if gate is None else (dx, *sums, dbranch, dgate, dbias)

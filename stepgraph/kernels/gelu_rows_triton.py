"""The Triton kernels of `gelu_rows`.

Forward goes over all elements. A program of backward takes some columns of consecutive rows, several rows at a time
with the next ones in flight, and holds its sums in registers; a second kernel adds up the programs' sums in order.
"""

import torch
import triton
import triton.language as tl

from stepgraph.kernels.norm.column_sum import add_rows
from stepgraph.kernels.norm.triton import plans

Tensor = torch.Tensor
#: Elements of a program of forward, and its warps.
BLOCK, WARPS = 2048, 4
#: Rows and columns of a step of backward, stages of loads, programs of a processor, warps.
ROWS, WIDTH, STAGES, PROGRAMS, WARPS_BACKWARD = 8, 256, 1, 8, 4


@triton.jit
def _inverse(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """1 / x, on a GPU to its last bit but one."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _tail(x: tl.tensor, FAST: tl.constexpr) -> tuple:
    """(the share of a normal distribution beyond ``|x|``, to 7.5e-8; exp(-x^2 / 2))."""
    t = _inverse(1.0 + 0.231641888 * tl.abs(x), FAST)  # 0.3275911 / sqrt(2)
    e = tl.exp2(x * x * -0.72134752044448)  # log2(e) / 2
    p = 0.5307027145 * t - 0.7265760135
    p = p * t + 0.7107068705
    p = p * t - 0.142248368
    p = p * t + 0.127414796
    return p * t * e, e


@triton.jit
def _sigmoid(x: tl.tensor, FAST: tl.constexpr) -> tuple:
    """(GELU by tanh over x: sigmoid(2 k (x + 0.044715 x^3)) with k = sqrt(2 / pi); the slope of what is inside)."""
    u = x * x
    inside = x * (-2.3022081985 - 0.1029432396 * u)  # times -log2(e)
    return _inverse(1.0 + tl.exp2(inside), FAST), 1.5957691216 + 0.2140644488 * u


@triton.jit
def _gelu(x: tl.tensor, TANH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    if TANH:
        s, _ = _sigmoid(x, FAST)
        return x * s
    else:
        q, _ = _tail(x, FAST)
        return tl.maximum(x, 0.0) - tl.minimum(tl.abs(x), 64.0) * q


@triton.jit
def _slope(x: tl.tensor, TANH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The derivative of GELU."""
    if TANH:
        s, slope = _sigmoid(x, FAST)
        return s + x * s * (1.0 - s) * slope
    else:
        q, e = _tail(x, FAST)
        return tl.where(x > 0, 1.0 - q, q) + x * e * 0.3989422804


@triton.jit
def _gelu_kernel(
    z: tl.tensor, a: tl.tensor, count: tl.tensor, TANH: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(z + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(a + at, _gelu(x, TANH, FAST).to(a.dtype.element_ty), mask=at < count)


@triton.jit
def _gelu_backward_kernel(
    da: tl.tensor, z: tl.tensor, dz: tl.tensor, partials: tl.tensor, M: tl.tensor, rows: tl.tensor, N: tl.constexpr,
    TANH: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """``WIDTH`` columns of ``rows`` rows. ``partials``: (programs over rows, N), or None."""
    ACROSS: tl.constexpr = (N + WIDTH - 1) // WIDTH
    part = tl.program_id(0) // ACROSS
    column = tl.program_id(0) % ACROSS * WIDTH + tl.arange(0, WIDTH)
    first = part * rows
    last = tl.minimum(first + rows, M)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < N)[None, :]
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        x = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(da + at, mask=mask, other=0.0).to(tl.float32)
        value = d * _slope(x, TANH, FAST)
        tl.store(dz + at, value.to(dz.dtype.element_ty), mask=mask)
        if partials is not None:
            total += value
    if partials is not None:
        tl.store(partials + part.to(tl.int64) * N + column, tl.sum(total, 0), mask=column < N)


def launch(z: Tensor, approximate: str) -> Tensor:
    """As `gelu_rows.gelu_rows`."""
    z = z.contiguous()
    a = torch.empty_like(z)
    if z.numel():
        _gelu_kernel[(triton.cdiv(z.numel(), BLOCK),)](
            z, a, z.numel(), TANH=approximate == "tanh", FAST=not plans.INTERPRETED, BLOCK=BLOCK, num_warps=WARPS
        )
    return a


def launch_backward(da: Tensor, z: Tensor, approximate: str, sums: bool) -> tuple[Tensor, Tensor]:
    """As `gelu_rows.gelu_rows_backward`."""
    da, z = da.contiguous(), z.contiguous()
    dz, N = torch.empty_like(z), z.shape[-1]
    if not z.numel():
        return dz, z.new_zeros(N if sums else 0)
    M, across = z.numel() // N, triton.cdiv(N, WIDTH)
    parts = max(1, PROGRAMS * plans.hardware_of(z).processors // across)
    rows = triton.cdiv(triton.cdiv(M, parts), ROWS) * ROWS
    parts = triton.cdiv(M, rows)
    partials = z.new_empty((parts, N), dtype=torch.float32) if sums else None
    _gelu_backward_kernel[(parts * across,)](
        da, z, dz, partials, M, rows, N=N, TANH=approximate == "tanh", FAST=not plans.INTERPRETED, ROWS=ROWS,
        WIDTH=WIDTH, STAGES=STAGES, num_warps=WARPS_BACKWARD,
    )  # fmt: skip
    return dz, z.new_empty(0) if partials is None else add_rows(partials, z.dtype)

"""The Triton kernels of `tokens`: one program per row for the sums, one per block for the gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.loss.cross_entropy_triton import configuration, in_rows

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _raised(top, total, v, LOG2E: tl.constexpr):
    """Once ``v`` is seen: the maximum, the same or 0 to subtract, the factor for older sums, exponentials of ``v``, and
    their ``total``."""
    higher = tl.maximum(top, tl.max(v, 0))
    # A row that starts with -inf has no maximum yet.
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    factor = tl.exp2((top - shift) * LOG2E)
    e = tl.exp2((v - shift) * LOG2E)
    return higher, shift, factor, e, total * factor + tl.sum(e, 0)


@triton.jit
def _seen(v, inside, top, total, weighted, plain, LOG2E: tl.constexpr):
    """The maximum and the sums of `_stats_kernel` once ``v`` is seen."""
    plain += tl.sum(tl.where(inside, v, 0.0), 0)
    higher, shift, factor, e, summed = _raised(top, total, v, LOG2E)
    moved = tl.where(top == -float("inf"), 0.0, top - shift)
    weighted = (weighted + total * moved) * factor + tl.sum(tl.where(e > 0, e * (v - shift), 0.0), 0)
    return higher, summed, weighted, plain


@triton.jit
def _stats_kernel(
    logits, labels, log_prob, log_sum, entropy, mean, stride, V, scale, ignore, BLOCK: tl.constexpr
):  # fmt: skip
    """Row ``program_id(0)``: the sums of e^(z - top), of (z - top) e^(z - top) and of z, and the label's z."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    scale = tl.cast(scale, tl.float32)
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    plain = 0.0
    whole = V // 16 * 16  # masks that end at a multiple of 16 leave loads of 16 bytes
    for start in range(0, whole, BLOCK):
        at = start + columns
        v = tl.load(x + at, mask=at < whole, other=-float("inf")).to(tl.float32) * scale
        top, total, weighted, plain = _seen(v, at < whole, top, total, weighted, plain, _LOG2E)
    rest = whole + tl.arange(0, 16)
    v = tl.load(x + rest, mask=rest < V, other=-float("inf")).to(tl.float32) * scale
    top, total, weighted, plain = _seen(v, rest < V, top, total, weighted, plain, _LOG2E)
    log_total = tl.log(total)
    inside = (label >= 0) & (label < V)
    chosen = tl.load(x + label, mask=inside, other=float("nan")).to(tl.float32) * scale
    tl.store(log_prob + row, tl.where(label == ignore, 0.0, (chosen - top) - log_total))
    tl.store(log_sum + row, top + log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(mean + row, plain / V)


@triton.jit
def _slopes(
    x, at, inside, label, log_sum, entropy, of_label, of_sum, of_entropy, of_mean, scale, LOG2E: tl.constexpr
):  # fmt: skip
    """Write the gradient over the logits ``at`` of the row ``x``."""
    log_p = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale - log_sum
    p = tl.exp2(log_p * LOG2E)
    result = (tl.where(at == label, 1.0, 0.0) - p) * of_label + (p * of_sum + of_mean)
    result -= tl.where(p > 0, p * (log_p + entropy), 0.0) * of_entropy
    tl.store(x + at, (result * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    logits, labels, log_sum, entropy, slope, sum_slope, entropy_slope, mean_slope, stride, V, scale, ignore,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = V // 16 * 16
    rest = whole + tl.arange(0, 16)
    last = (rest < V) & (tl.program_id(1) == tl.num_programs(1) - 1)
    x = logits + row * stride
    scale = tl.cast(scale, tl.float32)
    label = tl.load(labels + row)
    of_label = tl.where(label == ignore, 0.0, tl.load(slope + row))
    of_sum = tl.load(sum_slope + row)
    of_entropy = tl.load(entropy_slope + row)
    of_mean = tl.load(mean_slope + row) / V
    if (of_label == 0.0) & (of_sum == 0.0) & (of_entropy == 0.0) & (of_mean == 0.0):
        tl.store(x + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < whole)
        tl.store(x + rest, tl.zeros([16], logits.dtype.element_ty), mask=last)
    else:
        norm = tl.load(log_sum + row)
        spread = tl.load(entropy + row)
        _slopes(x, at, at < whole, label, norm, spread, of_label, of_sum, of_entropy, of_mean, scale, _LOG2E)
        _slopes(x, rest, last, label, norm, spread, of_label, of_sum, of_entropy, of_mean, scale, _LOG2E)


@triton.jit
def _both_seen(v, o, top, other_top, total, other_total, weighted, LOG2E: tl.constexpr):
    """The maxima and the sums of `_kl_kernel` once ``v`` and ``o`` are seen."""
    top, _, factor, e, total = _raised(top, total, v, LOG2E)
    weighted = weighted * factor + tl.sum(tl.where(e > 0, e * (v - o), 0.0), 0)
    other_top, _, factor, e, other_total = _raised(other_top, other_total, o, LOG2E)
    return top, other_top, total, other_total, weighted


@triton.jit
def _kl_kernel(logits, other, kl, log_sum, other_log_sum, stride, other_stride, V, scale, BLOCK: tl.constexpr):
    """Row ``program_id(0)``: both sums of exponentials, and that of e^(z - top) (z - o)."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    y = other + row * other_stride
    scale = tl.cast(scale, tl.float32)
    columns = tl.arange(0, BLOCK)
    top = -float("inf")
    other_top = -float("inf")
    total = 0.0
    other_total = 0.0
    weighted = 0.0
    whole = V // 16 * 16
    for start in range(0, whole, BLOCK):
        at = start + columns
        v = tl.load(x + at, mask=at < whole, other=-float("inf")).to(tl.float32) * scale
        o = tl.load(y + at, mask=at < whole, other=-float("inf")).to(tl.float32) * scale
        top, other_top, total, other_total, weighted = _both_seen(
            v, o, top, other_top, total, other_total, weighted, _LOG2E
        )
    rest = whole + tl.arange(0, 16)
    v = tl.load(x + rest, mask=rest < V, other=-float("inf")).to(tl.float32) * scale
    o = tl.load(y + rest, mask=rest < V, other=-float("inf")).to(tl.float32) * scale
    top, other_top, total, other_total, weighted = _both_seen(
        v, o, top, other_top, total, other_total, weighted, _LOG2E
    )
    own = top + tl.log(total)
    others = other_top + tl.log(other_total)
    tl.store(kl + row, weighted / total - (own - others))
    tl.store(log_sum + row, own)
    tl.store(other_log_sum + row, others)


@triton.jit
def _kl_slopes(x, y, at, inside, log_sum, other_log_sum, kl, factor, scale, OF_P: tl.constexpr, LOG2E: tl.constexpr):
    """Write the gradient over the logits ``at`` of the row ``x``."""
    own = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale - log_sum
    others = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale - other_log_sum
    p = tl.exp2(own * LOG2E)
    if OF_P:
        result = tl.where(p > 0, p * (own - others - kl), 0.0)
    else:
        result = p - tl.exp2(others * LOG2E)
    tl.store(x + at, (result * factor * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _kl_gradient_kernel(
    logits, other, log_sum, other_log_sum, kl, slope, stride, other_stride, V, scale,
    OF_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block ``program_id(1)`` of row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    whole = V // 16 * 16
    rest = whole + tl.arange(0, 16)
    last = (rest < V) & (tl.program_id(1) == tl.num_programs(1) - 1)
    x = logits + row * stride
    y = other + row * other_stride
    scale = tl.cast(scale, tl.float32)
    factor = tl.load(slope + row)
    if factor == 0.0:
        tl.store(x + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < whole)
        tl.store(x + rest, tl.zeros([16], logits.dtype.element_ty), mask=last)
    else:
        norm = tl.load(log_sum + row)
        others = tl.load(other_log_sum + row)
        mean = tl.load(kl + row)
        _kl_slopes(x, y, at, at < whole, norm, others, mean, factor, scale, OF_P, _LOG2E)
        _kl_slopes(x, y, rest, last, norm, others, mean, factor, scale, OF_P, _LOG2E)


Config = tuple[int, int] | None


def gradient_configuration(V: int) -> tuple[int, int]:
    """(BLOCK, warps) of a gradient: rows in a few blocks of 16 elements a thread."""
    block = min(max(triton.next_power_of_2(V), 128), 4096)
    return block, max(block // 512, 1)


def launch_stats(
    logits: Tensor, labels: Tensor, scale: float, ignore: int, config: Config = None
) -> tuple[Tensor, ...]:
    """As `tokens.token_stats`. ``config``: (BLOCK, warps), chosen by `configuration` if None."""
    logits = in_rows(logits)
    rows, V = logits.shape
    stats = tuple(torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    block, warps = config or configuration(V)
    if rows:
        _stats_kernel[(rows,)](
            logits, labels.contiguous(), *stats, logits.stride(0), V, scale, ignore, BLOCK=block, num_warps=warps
        )
    return stats


def launch_gradient(logits: Tensor, *rest: Any, config: Config = None) -> None:
    """As `tokens.token_gradient_`. ``config``: (BLOCK, warps), see `gradient_configuration`."""
    *numbers, scale, ignore = rest
    _write(_gradient_kernel, (logits,), numbers, config, scale, ignore)


def launch_kl(logits: Tensor, other: Tensor, scale: float, config: Config = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `tokens.token_kl_stats`. ``config``: (BLOCK, warps), see `kl_configuration`."""
    logits, other = in_rows(logits), in_rows(other)
    rows, V = logits.shape
    kl, log_sum, other_log_sum = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    block, warps = config or kl_configuration(V)
    if rows:
        _kl_kernel[(rows,)](
            logits, other, kl, log_sum, other_log_sum, logits.stride(0), other.stride(0), V, scale,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return kl, log_sum, other_log_sum


def kl_configuration(V: int) -> tuple[int, int]:
    """(BLOCK, warps) of the divergence, which holds two blocks of logits: half of `configuration`'s."""
    block, warps = configuration(V)
    return max(block // 2, 128), warps


def launch_kl_gradient(logits: Tensor, other: Tensor, *rest: Any, config: Config = None) -> None:
    """As `tokens.token_kl_gradient_`. ``config``: (BLOCK, warps), see `gradient_configuration`."""
    *numbers, scale, of_p = rest
    _write(_kl_gradient_kernel, (logits, other), numbers, config, scale, OF_P=of_p)


def _write(
    kernel: Any, logits: tuple[Tensor, ...], numbers: list[Tensor], config: Config, *rest: Any, **flags: bool
) -> None:
    """Write a gradient over the first of ``logits``; ``numbers``: of each row."""
    both = [in_rows(one) for one in logits]
    rows, V = both[0].shape
    block, warps = config or gradient_configuration(V)
    if rows:
        kernel[(rows, triton.cdiv(V, block))](
            *both, *(t.contiguous() for t in numbers), *(one.stride(0) for one in both), V, *rest, **flags,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if both[0] is not logits[0]:
        logits[0].copy_(both[0])

"""The Triton kernel of `cross_entropy`: one program per row, the second pass from registers or the L2 cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """(``cap tanh(x / cap)`` in fp32, its slope); without ``CAP``, ``x`` and 1."""
    v = x.to(tl.float32)
    if CAP:
        tanh = 2 * tl.sigmoid(v * (2 / cap)) - 1
        v = cap * tanh
        slope = 1 - tanh * tanh
    else:
        slope = 1.0
    return v, slope


@triton.jit
def _joined(top, total, v):
    """(the maximum, the sum of 2^(v - maximum)) once ``v`` is seen, from those of what was seen before."""
    higher = tl.maximum(top, tl.max(v, 0))
    # A row that starts with -inf has no maximum yet.
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, total * tl.exp2(top - shift) + tl.sum(tl.exp2(v - shift), 0)


@triton.jit
def _kernel(
    logits, targets, scale, losses, stride, V, ignore, cap, BLOCK: tl.constexpr, ONE: tl.constexpr,
    ORDERED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Row ``program_id(0)``: its loss, and ``(softmax - onehot) * scale`` over the logits, which are not read where the
    row does not count. ``ONE``: V <= BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    whole = V // 16 * 16  # masks that end at a multiple of 16 leave loads and stores of 16 bytes
    rest = whole + tl.arange(0, 16)
    if target == ignore:
        tl.store(losses + row, 0.0)
        written = True
        if ORDERED:  # where the first row of a block does not count, none does
            written = tl.load(targets + row // 128 * 128) != ignore
        if written:
            for start in range(0, whole, BLOCK):
                at = start + columns
                tl.store(x + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < whole)
            tl.store(x + rest, tl.zeros([16], logits.dtype.element_ty), mask=rest < V)
    else:
        # Base 2: the hardware's exponential. A running maximum per row, one exponential per element.
        if ONE:
            v, bend = _capped(tl.load(x + columns, mask=columns < V, other=0.0), cap, CAP)
            v = tl.where(columns < V, v * _LOG2E, -float("inf"))
            top = tl.max(v, 0)
            total = tl.sum(tl.exp2(v - top), 0)
        else:
            top = -float("inf")
            total = 0.0
            for start in range(0, whole, BLOCK):
                at = start + columns
                v, _ = _capped(tl.load(x + at, mask=at < whole, other=0.0, eviction_policy="evict_last"), cap, CAP)
                top, total = _joined(top, total, tl.where(at < whole, v * _LOG2E, -float("inf")))
            last, last_bend = _capped(tl.load(x + rest, mask=rest < V, other=0.0), cap, CAP)
            last = tl.where(rest < V, last * _LOG2E, -float("inf"))
            top, total = _joined(top, total, last)
        log_total = top + tl.log2(total)
        inside = (target >= 0) & (target < V)
        at_target, _ = _capped(tl.load(x + target, mask=inside, other=float("nan")), cap, CAP)
        tl.store(losses + row, log_total * _LN2 - at_target)
        factor = tl.load(scale)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        if ONE:
            slope = (tl.exp2(v - log_total) - tl.where(columns == target, 1.0, 0.0)) * bend * factor
            tl.store(x + columns, slope.to(logits.dtype.element_ty), mask=columns < V)
        else:
            for start in range(0, whole, BLOCK):
                at = start + columns
                v, bend = _capped(tl.load(x + at, mask=at < whole, other=0.0, eviction_policy="evict_first"), cap, CAP)
                slope = (tl.exp2(v * _LOG2E - log_total) - tl.where(at == target, 1.0, 0.0)) * bend * factor
                tl.store(x + at, slope.to(logits.dtype.element_ty), mask=at < whole)
            slope = (tl.exp2(last - log_total) - tl.where(rest == target, 1.0, 0.0)) * last_bend * factor
            tl.store(x + rest, slope.to(logits.dtype.element_ty), mask=rest < V)


def configuration(V: int) -> tuple[int, int]:
    """(BLOCK, warps) for rows of ``V`` logits: few warps with much work each, so that several programs share an SM and
    one computes while another waits for memory. A row in one block stays in registers, which limits its logits per
    warp: with 2,048, unaligned rows spill under Triton 3.9."""
    block = min(max(triton.next_power_of_2(V), 128), 8192)
    return block, min(max(block // 1024, 1), 8 if block >= V else 4)


def in_rows(logits: Tensor) -> Tensor:
    """``logits`` (M, V), or a copy where the elements of a row are not contiguous."""
    return logits if logits.shape[1] <= 1 or logits.stride(1) == 1 else logits.contiguous()


def launch(
    logits: Tensor, targets: Tensor, grad: Tensor, mean: bool, ignore: int, ordered: bool = False, cap: float = 0.0,
    config: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """As `cross_entropy.cross_entropy_`. ``config``: (BLOCK, warps), chosen by `configuration` if None."""
    given, logits = logits, in_rows(logits)
    rows, V = logits.shape
    count = (targets != ignore).sum() if mean else None
    scale = (grad / count if mean else grad).float()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block, warps = config or configuration(V)
    if rows:
        _kernel[(rows,)](
            logits, targets.contiguous(), scale, losses, logits.stride(0), V, ignore, cap,
            BLOCK=block, ONE=block >= V, ORDERED=ordered, CAP=cap != 0, num_warps=warps,
        )  # fmt: skip
    if logits is not given:
        given.copy_(logits)
    total = losses.sum()
    return total / count if mean else total

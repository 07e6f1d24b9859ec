"""The Triton kernels of `split`: one program per row for the sums, one per block for the gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.loss.cross_entropy_triton import configuration, in_rows

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _parts_kernel(logits, highest, total, stride, V, BLOCK: tl.constexpr):
    """Row ``program_id(0)``: its maximum, and its sum of exponentials, relative to it and in base 2, the hardware's."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    columns = tl.arange(0, BLOCK)
    top = -float("inf")
    summed = 0.0
    for start in range(0, V, BLOCK):
        at = start + columns
        v = tl.load(x + at, mask=at < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        # A row that starts with -inf has no maximum yet.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        summed = summed * tl.exp2((top - shift) * _LOG2E) + tl.sum(tl.exp2((v - shift) * _LOG2E), 0)
        top = higher
    tl.store(highest + row, top)
    tl.store(total + row, summed)


@triton.jit
def _gradient_kernel(logits, log_sum, column, slope, stride, V, BLOCK: tl.constexpr):
    """Block ``program_id(1)`` of row ``program_id(0)``: ``(softmax - onehot) * slope`` over the logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = logits + row * stride + at
    inside = at < V
    factor = tl.load(slope + row)
    if factor == 0.0:
        tl.store(x, tl.zeros([BLOCK], logits.dtype.element_ty), mask=inside)
    else:
        v = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        softmax = tl.exp2((v - tl.load(log_sum + row)) * _LOG2E)
        result = (softmax - tl.where(at == tl.load(column + row), 1.0, 0.0)) * factor
        tl.store(x, result.to(logits.dtype.element_ty), mask=inside)


def gradient_configuration(V: int) -> tuple[int, int]:
    """(BLOCK, warps) of the gradient: rows in a few blocks of 16 elements a thread."""
    block = min(max(triton.next_power_of_2(V), 128), 4096)
    return block, max(block // 512, 1)


def launch_parts(logits: Tensor, config: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """As `split.softmax_parts`. ``config``: (BLOCK, warps), chosen by `configuration` if None."""
    logits = in_rows(logits)
    rows, V = logits.shape
    highest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(highest)  # outputs of an operator may not share memory
    block, warps = config or configuration(V)
    if rows:
        _parts_kernel[(rows,)](logits, highest, total, logits.stride(0), V, BLOCK=block, num_warps=warps)
    return highest, total


def launch_gradient(
    logits: Tensor, log_sum: Tensor, column: Tensor, slope: Tensor, config: tuple[int, int] | None = None
) -> None:
    """As `split.split_gradient_`. ``config``: (BLOCK, warps), see `gradient_configuration`."""
    given, logits = logits, in_rows(logits)
    rows, V = logits.shape
    block, warps = config or gradient_configuration(V)
    if rows:
        _gradient_kernel[(rows, triton.cdiv(V, block))](
            logits, log_sum.contiguous(), column.contiguous(), slope.contiguous(), logits.stride(0), V,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if logits is not given:
        given.copy_(logits)

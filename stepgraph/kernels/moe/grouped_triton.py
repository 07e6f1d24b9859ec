"""Zeros in the rows that no expert has, which torch's grouped products leave as they are in memory."""

import torch
import triton
import triton.language as tl

ROWS, WARPS = 32, 8


@triton.jit
def _zero_past_kernel(out, offsets, experts, R, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to the rows that lie past the last offset."""
    end = tl.load(offsets + experts - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > end:
        row = first + tl.arange(0, ROWS)
        past = (row >= end) & (row < R)
        for start in range(0, F, BLOCK):
            column = start + tl.arange(0, BLOCK)
            to = out + row.to(tl.int64)[:, None] * F + column[None, :]
            tl.store(to, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=past[:, None] & (column < F)[None, :])


def zero_past(out: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``out`` (R, F), contiguous, with zeros past ``offsets[-1]``, written in place."""
    R, F = out.shape
    block = min(triton.next_power_of_2(F), 256)
    _zero_past_kernel[(triton.cdiv(R, ROWS),)](
        out, offsets.contiguous(), offsets.shape[0], R, F, ROWS=ROWS, BLOCK=block, num_warps=WARPS
    )
    return out

"""Cross entropy over a vocabulary sharded over ranks: what a rank computes from its own columns.

    highest_i = max_j x_ij        total_i = sum_j exp(x_ij - highest_i)
    dx_ij = (exp(x_ij - log_sum_i) - [j == column_i]) * slope_i

Ranks exchange ``highest`` and ``total``, two numbers per row. With the row's ``log_sum`` over all columns, the gradient
is computed from the logits and overwrites them. That is two kernels over the largest tensor of the step and no second
tensor of its size, instead of a maximum, a sum and a gradient that each cast it to fp32 again.
"""

import torch

from stepgraph.kernels.operator import operator


def parts_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_parts` in plain torch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = wide.amax(1)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    return highest, (wide - shift.unsqueeze(1)).exp().sum(1)


def gradient_reference(
    logits: torch.Tensor, log_sum: torch.Tensor, column: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    """What `split_gradient_` writes, in plain torch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    hit = torch.arange(logits.shape[1], device=logits.device) == column.unsqueeze(1)
    slopes = ((wide - log_sum.unsqueeze(1)).exp() - hit.to(wide.dtype)) * slope.unsqueeze(1)
    return slopes.masked_fill((slope == 0).unsqueeze(1), 0.0).to(logits.dtype)


def _of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


@operator(_of_rows, launch="loss.split_triton:launch_parts")
def softmax_parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of each row, in one pass.

    Args:
        logits: (M, V), fp32, bf16 or fp16, in any strides; rows that are not contiguous are copied. Computed in fp32.

    Returns:
        ``highest`` (M,) and ``total`` (M,), the sum of ``exp(x - highest)``, both fp32. A row of -inf has total 0.

    Deterministic: sums are taken in a fixed order.
    """
    highest, total = parts_reference(logits)
    return highest.float(), total.float()


@operator(lambda *_: None, launch="loss.split_triton:launch_gradient", writes={"logits"})
def split_gradient_(logits: torch.Tensor, log_sum: torch.Tensor, column: torch.Tensor, slope: torch.Tensor) -> None:
    """Write the gradient of the cross entropy over the logits.

    Args:
        logits: (M, V), fp32, bf16 or fp16, in any strides; rows that are not contiguous are copied. Computed in fp32,
            rounded once.
        log_sum: (M,) fp32, the logarithm of the row's sum of exponentials over all ranks' columns.
        column: (M,) int64, the target's column here; outside [0, V) where another rank has it.
        slope: (M,) fp32, the gradient of the row's loss. Rows where it is 0 become zeros, whatever they hold.
    """
    logits.copy_(gradient_reference(logits, log_sum, column, slope))

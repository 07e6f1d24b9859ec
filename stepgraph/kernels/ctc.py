"""The CTC loss in a graph: the shape of what its backward reads follows from the longest target, a number."""

from typing import Any

import torch

aten = torch.ops.aten


@torch.library.custom_op("stepgraph::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten._ctc_loss`` of log_probs (T, B, C): (loss per sequence (B,), log_alpha (B, T, 2 longest + 1)).

    ``longest``: the largest of ``target_lengths``.
    """
    return aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


@ctc_loss.register_fake
def _(log_probs: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (length, count, _), longest = log_probs.shape, others[-1]
    return log_probs.new_empty(count), log_probs.new_empty(count, length, 2 * longest + 1)

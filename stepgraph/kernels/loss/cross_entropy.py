"""Cross entropy and its gradient in one kernel.

    loss_i = logsumexp(x_i) - x_i[t_i]        dx_ij = (softmax(x_i)_j - [j == t_i]) * grad

with a soft cap, x = cap tanh(logits / cap), times its slope 1 - (x / cap)^2.

In a whole-step graph the incoming gradient is known before the loss is computed. So one kernel reads each row of logits
and overwrites it with its gradient: two passes over the largest tensor of the step, where separate forward and backward
kernels make three, and no second tensor of its size.
"""

import torch
from torch import Tensor

from stepgraph.kernels.operator import operator


def reference(
    logits: Tensor, targets: Tensor, grad: Tensor, mean: bool, ignore: int, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits), in plain torch; arguments as in `cross_entropy_`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tanh = (wide / cap).tanh() if cap else None
    logs = (wide if tanh is None else cap * tanh).log_softmax(1)
    counts = targets != ignore
    inside = (targets >= 0) & (targets < logits.shape[1])
    index = torch.where(counts & inside, targets, 0).unsqueeze(1)
    losses = torch.where(inside, -logs.gather(1, index).squeeze(1), torch.nan).where(counts, 0.0)
    scale = grad.to(logs.dtype) / (counts.sum() if mean else 1)
    loss = losses.sum() / counts.sum() if mean else losses.sum()
    slopes = logs.exp().scatter_add(1, index, -torch.ones_like(index, dtype=logs.dtype))
    if tanh is not None:
        slopes = slopes * (1 - tanh * tanh)
    return loss, torch.where(counts.unsqueeze(1), slopes * scale, 0.0).to(logits.dtype)


@operator(
    lambda logits, *_: logits.new_empty((), dtype=torch.float32),
    launch="loss.cross_entropy_triton:launch", writes={"logits"},
)  # fmt: skip
def cross_entropy_(
    logits: Tensor, targets: Tensor, grad: Tensor, mean: bool, ignore: int, ordered: bool = False, cap: float = 0.0
) -> Tensor:
    """The cross entropy of ``logits``, an fp32 scalar; the logits are overwritten with their gradient.

    logits: (M, V), fp32, bf16 or fp16, in any strides; rows that are not contiguous are copied. targets: (M,) int64, in
    [0, V); rows with target ``ignore`` do not count. Any other makes the loss NaN. grad: fp32 scalar, the gradient of
    the loss that is returned. mean: the loss is the mean over rows that count, else their sum. ordered: rows that count
    come first, and blocks of 128 rows after them stay as they are, whatever they hold. cap: the loss is that of ``cap
    tanh(logits / cap)``; 0 for none. Computed in fp32; sums are taken in a fixed order.
    """
    loss, slopes = reference(logits, targets, grad, mean, ignore, cap)
    logits.copy_(slopes)
    return loss.float()

"""Statistics of each token's distribution for post-training losses, and their gradient: two passes over the logits.

With z = scale * x, log p_ij = z_ij - log_sum_i:

    log_prob_i = log p_i,t_i          d log_prob_i / d z_ij = [j == t_i] - p_ij
    entropy_i  = -sum_j p_ij log p_ij    d entropy_i / d z_ij = -p_ij (log p_ij + entropy_i)

and for two rows of logits, p and q, of two models:

    kl_i = sum_j p_ij (log p_ij - log q_ij)    d kl_i / d (logits of q)_ij = q_ij - p_ij
                                               d kl_i / d (logits of p)_ij = p_ij (log p_ij - log q_ij - kl_i)

Unlike a cross entropy's, these gradients come in only after the loss is known (DPO's depends on both answers of a
pair), so the forward keeps a few numbers per row, and the backward overwrites logits with their gradient. So it is
where ranks share the vocabulary and exchange these numbers: a label may then be another rank's, and ``log_sum`` that of
all columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stepgraph.kernels.operator import operator


def stats_reference(logits: Tensor, labels: Tensor, scale: float, ignore: int) -> tuple[Tensor, ...]:
    """`token_stats` in plain torch."""
    z = _wide(logits, scale)
    log_sum = z.logsumexp(1)
    logs = z - log_sum.unsqueeze(1)
    counts, inside = labels != ignore, (labels >= 0) & (labels < logits.shape[1])
    chosen = logs.gather(1, labels.where(inside & counts, 0).unsqueeze(1)).squeeze(1)
    return chosen.where(inside, torch.nan).where(counts, 0.0), log_sum, -_expected(logs.exp(), logs), z.mean(1)


def gradient_reference(
    logits: Tensor, labels: Tensor, log_sum: Tensor, entropy: Tensor, slope: Tensor, sum_slope: Tensor,
    entropy_slope: Tensor, mean_slope: Tensor, scale: float, ignore: int
) -> Tensor:  # fmt: skip
    """What `token_gradient_` writes, in plain torch."""
    logs = _wide(logits, scale) - log_sum.unsqueeze(1)
    p = logs.exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(1)
    slope = slope.where(labels != ignore, 0.0)
    of_label = (hit.to(p.dtype) - p) * slope.unsqueeze(1)
    of_entropy = _product(p, logs + entropy.unsqueeze(1)) * entropy_slope.unsqueeze(1)
    of_sums = p * sum_slope.unsqueeze(1) + (mean_slope / logits.shape[1]).unsqueeze(1)
    none = torch.stack([slope, sum_slope, entropy_slope, mean_slope]).eq(0).all(0)
    return ((of_label - of_entropy + of_sums) * scale).masked_fill(none.unsqueeze(1), 0.0).to(logits.dtype)


def kl_reference(logits: Tensor, other: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`token_kl_stats` in plain torch."""
    z, o = _wide(logits, scale), _wide(other, scale)
    sums = z.logsumexp(1), o.logsumexp(1)
    logs = z - sums[0].unsqueeze(1)
    return _expected(logs.exp(), logs - (o - sums[1].unsqueeze(1))), *sums


def kl_gradient_reference(
    logits: Tensor, other: Tensor, log_sum: Tensor, other_log_sum: Tensor, kl: Tensor,
    slope: Tensor, scale: float, of_p: bool
) -> Tensor:  # fmt: skip
    """What `token_kl_gradient_` writes, in plain torch."""
    logs, others = _wide(logits, scale) - log_sum.unsqueeze(1), _wide(other, scale) - other_log_sum.unsqueeze(1)
    p = logs.exp()
    slopes = _product(p, logs - others - kl.unsqueeze(1)) if of_p else p - others.exp()
    return (slopes * (slope * scale).unsqueeze(1)).masked_fill((slope == 0).unsqueeze(1), 0.0).to(logits.dtype)


def _wide(logits: Tensor, scale: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale


def _product(p: Tensor, x: Tensor) -> Tensor:
    """``p * x``, 0 where p is 0, whatever x is there."""
    return torch.where(p > 0, p * x, 0.0)


def _expected(p: Tensor, x: Tensor) -> Tensor:
    return _product(p, x).sum(1)


def _narrow(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.float() for value in found)


def _of_rows(count: int) -> Callable[..., tuple[Tensor, ...]]:
    return lambda logits, *_: tuple(logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(count))


@operator(_of_rows(4), launch="loss.tokens_triton:launch_stats")
def token_stats(logits: Tensor, labels: Tensor, scale: float, ignore: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability of the label, entropy and mean logit of each row, in one pass: ``log_prob``, ``log_sum`` (the
    logarithm of the sum of exponentials), ``entropy`` in nats and ``mean`` of the logits times ``scale``, (M,) fp32
    each.

    logits: (M, V), fp32, bf16 or fp16, in any strides; rows that are not contiguous are copied. labels: (M,) int64 in
    [0, V); rows with ``ignore`` have log-probability 0, any other label gives NaN. scale: what logits are multiplied
    by, 1 / temperature. Computed in fp32; sums are taken in a fixed order.
    """
    return _narrow(stats_reference(logits, labels, scale, ignore))


@operator(lambda *_: None, launch="loss.tokens_triton:launch_gradient", writes={"logits"})
def token_gradient_(
    logits: Tensor, labels: Tensor, log_sum: Tensor, entropy: Tensor, slope: Tensor, sum_slope: Tensor,
    entropy_slope: Tensor, mean_slope: Tensor, scale: float, ignore: int
) -> None:  # fmt: skip
    """Write over ``logits`` their gradient, of what `token_stats` gave for the same arguments. Computed in fp32 and
    rounded once.

    labels: as there; outside [0, V) where another rank has the label's column. log_sum: as there, or of the columns of
    all ranks. slope, sum_slope, entropy_slope, mean_slope: (M,) fp32, gradients of what `token_stats` gives of a row,
    in its order. Rows where all are 0 become zeros, whatever they hold.
    """
    slopes = slope, sum_slope, entropy_slope, mean_slope
    logits.copy_(gradient_reference(logits, labels, log_sum, entropy, *slopes, scale, ignore))


@operator(_of_rows(3), launch="loss.tokens_triton:launch_kl")
def token_kl_stats(logits: Tensor, other: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) of each row in nats, p by ``logits`` and q by ``other``, and the ``log_sum`` of both, (M,) fp32 each,
    in one pass. Arguments as in `token_stats`; ``scale``: of both."""
    return _narrow(kl_reference(logits, other, scale))


@operator(lambda *_: None, launch="loss.tokens_triton:launch_kl_gradient", writes={"logits"})
def token_kl_gradient_(
    logits: Tensor, other: Tensor, log_sum: Tensor, other_log_sum: Tensor, kl: Tensor,
    slope: Tensor, scale: float, of_p: bool
) -> None:  # fmt: skip
    """Write over ``logits`` the gradient of a KL divergence from ``other``. Computed in fp32 and rounded once.

    logits, other: (M, V), as in `token_kl_stats`, each with its ``log_sum`` (M,) fp32. kl, slope: (M,) fp32, the
    divergence and its gradient. Rows where ``slope`` is 0 become zeros. of_p: ``logits`` are those of p, else of q, in
    KL(p || q).
    """
    logits.copy_(kl_gradient_reference(logits, other, log_sum, other_log_sum, kl, slope, scale, of_p))

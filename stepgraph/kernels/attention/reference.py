"""Attention in plain torch: everything in fp32, or fp64 for fp64.

    out = softmax(scale q k^T) v        lse = log of the softmax's denominator, with the scale inside

``q`` (..., H, T, D), ``k`` (..., H_kv, S, D), ``v`` (..., H_kv, S, D_v); H_kv divides H. ``hidden`` (T, S) is true
where a query does not see a key; None: each sees all.
Source of the gradients: Dao et al., "FlashAttention", 2022, appendix B.
"""

import math

import torch

Tensor = torch.Tensor


def wide(x: Tensor) -> torch.dtype:
    """The dtype that attention of ``x`` is computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` (..., H, T, D_v) and ``lse`` (..., H, T)."""
    scores = _scores(q.to(wide(q)), _repeated(k, q), hidden, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ _repeated(v, q), lse


def gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v, from ``dy``, that of ``out``, and what `attend` gave, ``y`` and ``lse``."""
    heads, k, v = (k.shape[-3], -1), _repeated(k, q), _repeated(v, q)
    dy, q, y = (x.to(wide(q)) for x in (dy, q, y))
    p = (_scores(q, k, hidden, scale) - lse.unsqueeze(-1)).exp()
    ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * scale
    dk, dv = ((a.mT @ b).unflatten(-3, heads).sum(-3) for a, b in ((ds, q), (p, dy)))
    return ds @ k, dk, dv


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, once for each head of ``q``."""
    return x.to(wide(q)).repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

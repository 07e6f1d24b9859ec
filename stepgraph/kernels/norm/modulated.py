"""The backward of a layer norm whose result each sequence scales and shifts by its own condition (adaLN).

    y = xhat * w + shift,  w = scale + offset            x = residual + gate * branch
    g = dy * w
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh
    dscale = sum over tokens of dy * xhat                dshift = sum over tokens of dy
    dbranch = dx * gate                                  dgate = sum over tokens of dx * branch
    dbias = sum over all rows of dbranch

dx is the gradient of what the norm reads, the sum of the residual stream and a gated branch: so the gradient of that
gate needs the same rows, and so does that of the bias of the linear layer that ends the branch. One kernel reads dy, x,
dh and branch once, where a compiler reads ten tensors, since sums over tokens and over channels are kernels of their
own. Made by the pass `modulated_norm` after the step was traced: they have no gradients of their own.
Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023 (adaLN).
"""

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor

#: Channels of the widest row that a program of the kernel holds.
WIDEST = 4096


def _like(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape)
    return dx, *(scale.new_empty(scale.shape) for _ in range(2))


def _like_gated(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, offset: float, dh: Tensor | None, branch: Tensor,
    gate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gated = branch.new_empty(branch.shape), gate.new_empty(gate.shape), branch.new_empty(branch.shape[-1])
    return *_like(dy, x, mean, rstd, scale), *gated


def _backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, offset: float, dh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dscale and dshift, not rounded yet."""
    wide = torch.promote_types(x.dtype, torch.float32)
    d, xhat = dy.to(wide), (x.to(wide) - mean) * rstd
    g = d * (scale.to(wide) + offset)
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx if dh is None else dx + dh, (d * xhat).sum(1, keepdim=True), d.sum(1, keepdim=True)


@operator(_like, launch="norm.modulated_triton:launch")
def modulated_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, offset: float, dh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a layer norm without weights, scaled and shifted by sequence.

    Args:
        dy: (B, T, N), the gradient of the norm's shifted result. x: (B, T, N), what was normalized.
        mean, rstd: (B, T, 1), its statistics. scale: (B, 1, N); ``scale + offset`` multiplies the normalized rows.
        dh: None, or (B, T, N): the gradient from the residual stream, which is added to that of ``x``.

    Returns:
        dx (B, T, N) in the dtype of ``x``, dscale and dshift (B, 1, N) in that of ``scale``; contiguous. Sums are in
        fp32, in a fixed order.
    """
    dx, *sums = _backward(dy, x, mean, rstd, scale, offset, dh)
    return dx.to(x.dtype), *(each.to(scale.dtype) for each in sums)


@operator(_like_gated, launch="norm.modulated_triton:launch")
def gated_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, offset: float, dh: Tensor | None, branch: Tensor,
    gate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`modulated_norm_backward` where ``x`` is a residual plus ``gate * branch``, with the gradients of these two.

    Args:
        branch: (B, T, N). gate: (B, 1, N). The others as there.

    Returns:
        dx, dscale and dshift as there, dbranch (B, T, N) in the dtype of ``branch``, dgate (B, 1, N) in that of
        ``gate``, and dbias (N,), the sum of the rows of dbranch, in that of ``branch``.
    """
    dx, *sums = _backward(dy, x, mean, rstd, scale, offset, dh)
    dbranch, dgate = dx * gate, (dx * branch).sum(1, keepdim=True).to(gate.dtype)
    dbias = dbranch.sum((0, 1)).to(branch.dtype)
    return dx.to(x.dtype), *(each.to(scale.dtype) for each in sums), dbranch.to(branch.dtype), dgate, dbias

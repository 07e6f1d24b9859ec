"""Gradients as ``backward()`` leaves them: their layout, their clipping, and where they land.

``torch.autograd.grad`` hands out what autograd computed: it may be expanded, laid out in another order than the
parameter, or one tensor for two parameters. ``backward()`` puts that in order when it accumulates, and the order of
memory decides the rounding of norms and what the fused optimizer kernels, which read memory linearly, make of it.
"""

from collections.abc import Iterable, Sequence

import torch

from stepgraph import compat
from stepgraph.capture.state import Slot, Wrapping, wrap


def as_accumulated(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``grad`` with the memory layout of ``param``; copied only where it has another."""
    if compat.is_traceable_wrapper_subclass(grad) or grad.stride() == param.stride():
        return grad
    order = sorted(range(param.ndim), key=param.stride, reverse=True)
    return grad.permute(order).contiguous().permute(sorted(range(param.ndim), key=order.__getitem__))


def clip(grads: dict[int, torch.Tensor], max_norm: float) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Scale gradients to a total 2-norm of at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    values = list(grads.values())
    on_cuda = all(g.device.type == "cuda" for g in values)
    norm = torch.nn.utils.get_total_norm(values, 2.0, foreach=on_cuda or None)
    if compat.is_traceable_wrapper_subclass(norm):  # DTensor: a partial norm on each rank
        norm = norm.full_tensor()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if on_cuda and not any(compat.is_traceable_wrapper_subclass(g) for g in values):
        clipped = torch.ops.aten._foreach_mul.Tensor(values, scale)
    else:
        clipped = [(g * scale).to(g.dtype) for g in values]
    return dict(zip(grads, clipped, strict=True)), norm


def local(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The local tensor of a gradient, laid out over the mesh as its parameter is."""
    if not compat.is_traceable_wrapper_subclass(grad):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return as_accumulated(grad.to_local(), param.to_local())


def unshared(grads: Iterable[torch.Tensor], taken: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``grads``, copied where one lies in the storage of another or of the tensors ``taken``."""
    keys = {compat.storage_key(t) for t in taken}
    result = []
    for grad in grads:
        if compat.storage_key(grad) in keys:
            grad = grad.clone()
        keys.add(compat.storage_key(grad))
        result.append(grad)
    return result


def land(landing: Sequence[tuple[Slot, Wrapping | None]], grads: Sequence[torch.Tensor]) -> None:
    """Add gradients to ``param.grad`` as ``backward()`` does: assigned where it is None, accumulated elsewhere."""
    for (slot, wrapping), grad in zip(landing, grads, strict=True):
        grad = wrap([grad], wrapping)
        if slot.tensor.grad is None:
            slot.tensor.grad = grad
        else:
            slot.tensor.grad.add_(grad)

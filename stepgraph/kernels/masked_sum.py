"""Sums of masked elements, in eager's order: ``x.masked_select(mask).sum()``, whose bits depend on the mask."""

from collections.abc import Sequence

import torch


@torch.library.custom_op("stepgraph::masked_sum", mutates_args=())
def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` where ``mask``, of a shape that broadcasts to that of ``x``, is true, as a scalar tensor.

    On a GPU the host waits for the number of elements, as in eager.
    """
    return x.masked_select(mask).sum()


masked_sum.register_fake(lambda x, mask: x.new_empty(()))


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: torch.Tensor) -> None:
    x, mask = inputs
    ctx.save_for_backward(mask)
    ctx.shape = x.shape


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (mask,) = ctx.saved_tensors
    return torch.where(mask, grad, 0).expand(ctx.shape), None


masked_sum.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("stepgraph::selected_sum", mutates_args=())
def selected_sum(x: torch.Tensor, indices: Sequence[torch.Tensor | None], shape: Sequence[int]) -> torch.Tensor:
    """``x[indices]``, masks among these, summed to a ``shape`` that broadcasts to it.

    On a GPU the host waits for the number of elements, as in eager.
    """
    found = x[tuple(slice(None) if index is None else index for index in indices)]
    ones = next((i for i, size in enumerate(shape) if size != 1 or len(shape) - i <= found.ndim), len(shape))
    summed = found.sum_to_size(shape[ones:]).view(shape)
    return summed.clone() if summed.data_ptr() == x.data_ptr() else summed


selected_sum.register_fake(lambda x, indices, shape: x.new_empty(shape))


def _setup_selected(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: torch.Tensor) -> None:
    x, indices, _ = inputs
    ctx.places = [index is not None for index in indices]
    ctx.save_for_backward(*(index for index in indices if index is not None))
    ctx.shape = x.shape


def _backward_selected(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple:
    given = iter(ctx.saved_tensors)
    indices = tuple(next(given) if is_tensor else slice(None) for is_tensor in ctx.places)
    back = grad.new_zeros(ctx.shape)
    back[indices] = grad
    return back, [None] * len(ctx.places), None


selected_sum.register_autograd(_backward_selected, setup_context=_setup_selected)

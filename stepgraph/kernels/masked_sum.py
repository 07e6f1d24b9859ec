"""The sum of what a mask selects, in eager's order: ``x.masked_select(mask).sum()``, whose bits depend on the mask."""

import torch


@torch.library.custom_op("stepgraph::masked_sum", mutates_args=())
def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` where ``mask``, of a shape that broadcasts to that of ``x``, is true, as a scalar tensor.

    On a GPU the host waits for the number of elements, as in eager.
    """
    return x.masked_select(mask).sum()


@masked_sum.register_fake
def _(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: torch.Tensor) -> None:
    x, mask = inputs
    ctx.save_for_backward(mask)
    ctx.shape = x.shape


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (mask,) = ctx.saved_tensors
    return torch.where(mask, grad, 0).expand(ctx.shape), None


masked_sum.register_autograd(_backward, setup_context=_setup)

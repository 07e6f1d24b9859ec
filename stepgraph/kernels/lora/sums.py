"""A sum of matrix products, accumulated by the products themselves.

    y = scale * a[0] @ b[0] + a[1] @ b[1] + ... + bias

The first product writes the result, each other one adds to it (cuBLAS: beta = 1), so nothing else passes over it.
``torch.addmm`` of a matrix copies that first, which costs what an addition does.
"""

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def reference(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """`sum_products` in plain torch: summed in fp32 (fp64 for fp64), rounded once."""
    wide = torch.promote_types(a[0].dtype, torch.float32)
    first, *others = (x.to(wide) @ y.to(wide) for x, y in zip(a, b, strict=True))
    total = scale * first + sum(others)
    return (total if bias is None else total + bias.to(wide)).to(a[0].dtype)


@operator(lambda a, b, *_: a[0].new_empty(a[0].shape[0], b[0].shape[1]))
def sum_products(a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """The sum of products of the matrices ``a`` (M, K_i) and ``b`` (K_i, N), one or more, and of ``bias`` (N,), or
    None: (M, N), contiguous, rounded after each product. All of one dtype, in any strides. ``scale``: of the first
    product alone, applied before it is rounded."""
    out = a[0].new_empty(a[0].shape[0], b[0].shape[1])
    if bias is None:
        torch.addmm(out, a[0], b[0], beta=0, alpha=scale, out=out)
    else:
        torch.addmm(bias, a[0], b[0], alpha=scale, out=out)
    for x, y in zip(a[1:], b[1:], strict=True):
        out.addmm_(x, y)
    return out


register_flop_formula(torch.ops.stepgraph.sum_products)(
    lambda a_shapes, b_shapes, *_, **__: sum(2 * a[0] * a[1] * b[1] for a, b in zip(a_shapes, b_shapes, strict=True))
)


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    a, b, bias, ctx.scale = inputs
    ctx.save_for_backward(*a, *b)
    ctx.biased = bias is not None


def _backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple:
    pairs = len(ctx.saved_tensors) // 2
    a, b = ctx.saved_tensors[:pairs], ctx.saved_tensors[pairs:]
    scales = [ctx.scale] + [1.0] * (pairs - 1)
    da = [dy @ y.t() * scale for y, scale in zip(b, scales, strict=True)]
    db = [x.t() @ dy * scale for x, scale in zip(a, scales, strict=True)]
    return da, db, dy.sum(0) if ctx.biased else None, None


sum_products.register_autograd(_backward, setup_context=_setup)

"""Gradients of the operators, and the entry point `norm` that public functions call.

In plain eager the entry point calls the backend from a `torch.autograd.Function` and bypasses the dispatcher, which is
most of the cost of a call. The compiler, fake tensors, DTensor and dispatch modes get the operators of
``torch.ops.stepgraph``. Both paths share the formulas below. There is no second derivative.
"""

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.compat import in_function_transform, in_plain_eager
from stepgraph.kernels.norm import operators, sharding
from stepgraph.kernels.norm.operators import Options
from stepgraph.kernels.norm.spec import Norm, default_eps

Tensor = torch.Tensor
Optional = Tensor | None
ops = torch.ops.stepgraph


def _any_needs_grad(x: Tensor, a: Optional, b: Optional, c: Optional) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad
        or (a is not None and a.requires_grad)
        or (b is not None and b.requires_grad)
        or (c is not None and c.requires_grad)
    )


def _save(
    ctx: Any, options: Options, x: Tensor, weight: Optional, residual: Optional, h: Optional, *stats: Optional
) -> None:
    if residual is not None and h is None:
        raise ValueError(
            "keep_h is False and a gradient is needed; allowed is True, backward reads h: pass keep_h=True"
        )
    ctx.call = options, x.dtype, None if residual is None else residual.dtype
    ctx.save_for_backward(x if residual is None else h, weight, *stats)
    ctx.set_materialize_grads(False)


def _backward(
    options: Options, dy: Tensor, h: Tensor, weight: Optional, mean: Optional, rstd: Tensor, dh: Optional, *rest: Any
) -> Sequence[Optional]:
    # Where gradients are enabled a second derivative may be wanted, which the operator refuses.
    if not torch.is_grad_enabled() and in_plain_eager(dy, h, weight, dh):
        return operators.backward(options, dy, h, weight, mean, rstd, dh, *rest)
    return ops.norm_backward.default(dy, h, weight, mean, rstd, dh, *options, *rest)


def _as(gradient: Optional, dtype: torch.dtype) -> Optional:
    """``gradient`` in ``dtype``; `torch.Tensor.to` takes a microsecond even when there is nothing to convert."""
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


def gradients(
    call: tuple[Options, torch.dtype, torch.dtype | None],
    needs: Sequence[bool],
    saved: Sequence[Optional],
    dy: Optional,
    dh: Optional,
) -> tuple[Optional, Optional, Optional, Optional]:
    """Gradients of x, weight, bias and residual, of which ``needs`` says which are wanted.

    ``call``: the norm's options, and the dtypes of x and of residual. ``saved``: h, weight, mean and rstd.
    """
    options, x_dtype, residual_dtype = call
    need_x, need_weight, need_bias, need_residual = needs
    h, weight, mean, rstd = saved
    # The residual stream may be wider than x: its gradient must not be rounded on the way.
    wider = need_residual and residual_dtype is not x_dtype
    dx_dtype = torch.promote_types(x_dtype, residual_dtype) if wider else x_dtype
    if dy is None:
        d, dw, db = dh, None, None
    else:
        wanted = (need_x or need_residual, need_weight, need_bias)
        d, dw, db = _backward(options, dy, h, weight, mean, rstd, dh, dx_dtype, *wanted)[:3]
    return _as(d, x_dtype) if need_x else None, dw, db, _as(d, residual_dtype) if need_residual else None


class _Direct(torch.autograd.Function):
    """`norm` without the dispatcher: y, then h if the call has it."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, options):
        y, h, mean, rstd = operators.forward(options, x, weight, bias, residual, True)[:4]
        _save(ctx, options, x, weight, residual, h, mean, rstd)
        return y if h is None else (y, h)

    @staticmethod
    def backward(ctx, dy, dh=None):
        return *gradients(ctx.call, ctx.needs_input_grad[:4], ctx.saved_tensors, dy, dh), None


# Python's `apply` first repeats checks that `in_plain_eager` has made, which takes microseconds.
_apply = super(torch.autograd.Function, _Direct).apply


def norm(
    kind: str, x: Tensor, weight: Optional, bias: Optional, residual: Optional, eps: float | None,
    weight_offset: float, out_dtype: torch.dtype | None, prenorm: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """y, or ``(y, h)`` with ``prenorm``. Raises ``ValueError`` as `spec.check` does."""
    options = (out_dtype or x.dtype, kind, default_eps(x.dtype) if eps is None else eps, weight_offset)
    needs_grad = _any_needs_grad(x, weight, bias, residual)
    if not in_plain_eager(x, weight, bias, residual):
        if in_function_transform():
            raise ValueError("norms of stepgraph take no transforms of torch.func: use torch.nn.RMSNorm or LayerNorm")
        sharding.check(x)
        y, h, *_ = ops.norm.default(x, weight, bias, residual, *options, prenorm or needs_grad)
    elif not needs_grad:
        y, h, *_ = operators.forward(options, x, weight, bias, residual, prenorm)
    elif residual is None:
        y = _apply(x, weight, bias, None, options)
    else:
        y, h = _apply(x, weight, bias, residual, options)
    return (y, x if residual is None else h) if prenorm else y


def _operator_setup(ctx, inputs, output):
    x, weight, _, residual, *options, _ = inputs
    _, h, mean, rstd = output
    _save(ctx, tuple(options), x, weight, residual, h, mean, rstd)
    ctx.mark_non_differentiable(*(t for t in (mean, rstd) if t is not None))


def _operator_backward(ctx, dy, dh, *_):
    return *gradients(ctx.call, ctx.needs_input_grad[:4], ctx.saved_tensors, dy, dh), *[None] * (len(Norm._fields) + 1)


def _no_second(ctx, *_):
    raise ValueError("norms of stepgraph have no second derivative: use torch.nn.RMSNorm or LayerNorm")


torch.library.register_autograd("stepgraph::norm", _operator_backward, setup_context=_operator_setup)
torch.library.register_autograd("stepgraph::norm_backward", _no_second)

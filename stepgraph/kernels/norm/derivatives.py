"""Gradients of the operators, and the entry point `norm` that public functions call.

In plain eager the entry point calls the backend from a `torch.autograd.Function` and bypasses the dispatcher, which is
most of the cost of a call. The compiler, fake tensors, DTensor and dispatch modes get the operators of
``torch.ops.stepgraph``. Transforms of ``torch.func`` do not support gradients registered for operators, so they get an
autograd function around the operator. All three paths share the formulas below.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.compat import in_function_transform, in_plain_eager
from stepgraph.kernels.norm import operators, reference, sharding
from stepgraph.kernels.norm.operators import Options
from stepgraph.kernels.norm.spec import Norm, default_eps

Tensor = torch.Tensor
Optional = Tensor | None


def _any_needs_grad(x: Tensor, a: Optional, b: Optional, c: Optional) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad
        or (a is not None and a.requires_grad)
        or (b is not None and b.requires_grad)
        or (c is not None and c.requires_grad)
    )


def _rows(x: Tensor) -> Tensor:
    """``x`` with last stride 1: a batch may have been its last dimension."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _differentiable(name: str, setup_context: Callable, backward: Callable) -> Callable:
    """``torch.ops.stepgraph.<name>`` with gradient and batching rule, also under the transforms of ``torch.func``."""
    operator = getattr(torch.ops.stepgraph, name).default

    def call(*arguments: Any) -> Any:
        return (Transformed.apply if in_function_transform() else operator)(*arguments)

    def batch(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """One call for each sample."""
        samples = [
            # Not the operator itself: this transform may be nested in another one.
            call(*(a if dim is None else _rows(a.select(dim, i)) for a, dim in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        outputs = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*samples, strict=True))
        return outputs, tuple(None if output is None else 0 for output in outputs)

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

    Transformed.setup_context = staticmethod(setup_context)
    Transformed.backward = staticmethod(backward)
    Transformed.vmap = staticmethod(batch)
    torch.library.register_autograd(f"stepgraph::{name}", backward, setup_context=setup_context)
    torch.library.register_vmap(f"stepgraph::{name}", batch)
    return call


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
    # Where gradients are enabled a second derivative is wanted, and only the operator has one.
    if not torch.is_grad_enabled() and in_plain_eager(dy, h, weight, dh):
        return operators.backward(options, dy, h, weight, mean, rstd, dh, *rest)
    return _dispatched_backward(dy, h, weight, mean, rstd, dh, *options, *rest)


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
    def forward(
        ctx: Any, x: Tensor, weight: Optional, bias: Optional, residual: Optional, options: Options
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, h, mean, rstd = operators.forward(options, x, weight, bias, residual, True)[:4]
        _save(ctx, options, x, weight, residual, h, mean, rstd)
        # h is always an output: a second derivative goes through it.
        return y if h is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Optional, dh: Optional = None) -> tuple[Optional, ...]:
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
        sharding.check(x)
        # Inside a transform the tensors do not show whether a gradient is wanted outside it.
        keep_h = prenorm or needs_grad or in_function_transform()
        y, h, *_ = _dispatched(x, weight, bias, residual, *options, keep_h)
    elif not needs_grad:
        y, h, *_ = operators.forward(options, x, weight, bias, residual, prenorm)
    elif residual is None:
        y = _apply(x, weight, bias, None, options)
    else:
        y, h = _apply(x, weight, bias, residual, options)
    return (y, x if residual is None else h) if prenorm else y


def _operator_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, _, residual, *options, _ = inputs
    _, h, mean, rstd = output
    _save(ctx, tuple(options), x, weight, residual, h, mean, rstd)
    ctx.mark_non_differentiable(*(t for t in (mean, rstd) if t is not None))


def _operator_backward(ctx: Any, dy: Optional, dh: Optional, *_: Optional) -> tuple[Optional, ...]:
    return *gradients(ctx.call, ctx.needs_input_grad[:4], ctx.saved_tensors, dy, dh), *[None] * (len(Norm._fields) + 1)


_dispatched = _differentiable("norm", _operator_setup, _operator_backward)


# Second and higher derivatives: torch differentiates the reference's formulas. The statistics are recomputed from h,
# on which they depend; the ones that the operator was given are constants.


def _vjp(function: Any, inputs: list[Optional], cotangents: tuple[Optional, ...]) -> list[Optional]:
    """Gradients of ``function``; its inputs and its outputs may be None."""
    given = [i for i, tensor in enumerate(inputs) if tensor is not None]

    def of_given(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = list(inputs)
        for i, tensor in zip(given, tensors, strict=True):
            arguments[i] = tensor
        return tuple(output for output in function(*arguments) if output is not None)

    outputs, vjp, *_ = torch.func.vjp(of_given, *(inputs[i] for i in given))
    # Outputs that are None have no cotangent: the others match one to one.
    gradients = vjp(tuple(torch.zeros_like(o) if c is None else c for o, c in zip(outputs, cotangents, strict=True)))
    result: list[Optional] = [None] * len(inputs)
    for i, gradient in zip(given, gradients, strict=True):
        result[i] = gradient
    return result


def _setup_second(ctx: Any, inputs: tuple, output: tuple) -> None:
    dy, h, weight, _, _, dh, *options = inputs
    ctx.norm, ctx.options = operators.from_options(*options[:4]), options[4:]
    ctx.save_for_backward(dy, h, weight, dh)
    ctx.set_materialize_grads(False)


def _second(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
    def first(dy: Tensor, h: Tensor, weight: Optional, dh: Optional) -> tuple[Optional, ...]:
        stats = reference.statistics(ctx.norm, h)
        return reference.backward(ctx.norm, dy, h, weight, *stats, dh, *ctx.options)

    wanted = tuple(c for c, needed in zip(cotangents, ctx.options[1:], strict=True) if needed)
    dy, h, weight, dh = _vjp(first, list(ctx.saved_tensors), wanted)
    return dy, h, weight, None, None, dh, *[None] * (len(Norm._fields) + len(ctx.options))


_dispatched_backward = _differentiable("norm_backward", _setup_second, _second)

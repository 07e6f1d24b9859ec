"""Eager calls made again: what was decided for a call holds for all calls of tensors alike.

A call on a GPU spends most of its time on the host, and most of that on finding out what an earlier call of a model has
found out already: which path it takes, whether a gradient is needed, the plan of its launch. Here one check by torch,
`stepgraph.compat.alike`, stands for all of it. Calls with a weight and without residual, prenorm and fp8 come here
first; `norm` returns None for those that `derivatives` must make.
"""

import functools
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import NamedTuple

import torch

from stepgraph.compat import alike, in_plain_eager
from stepgraph.kernels.norm import derivatives
from stepgraph.kernels.norm.spec import Norm, described

Tensor = torch.Tensor
Optional = Tensor | None


class _Call(NamedTuple):
    """A call that can be made again. It keeps no tensor."""

    alike: Callable[..., bool]
    """Whether x, weight, and bias if there is one, are as they were."""
    run: Callable[[Tensor, Tensor, Optional], tuple[Tensor, Optional, Tensor]]
    """x, weight and bias to y, mean and rstd."""
    gradients: bool
    """Whether any of them needs a gradient, where gradients are enabled."""
    described: tuple[Norm, torch.dtype, None]
    """What `derivatives.gradients` has to know of it."""
    backwards: dict[tuple[bool, ...], "_Backward"]
    """By the inputs that need a gradient."""


class _Backward(NamedTuple):
    """The backward of a `_Call`, for dy laid out as y."""

    alike: Callable[..., bool]
    """Whether dy, x and weight are as they were."""
    run: Callable[[Tensor, Tensor, Tensor, Optional, Tensor], tuple[Optional, Optional, Optional]]
    """dy, x, weight, mean and rstd to dx, dw and db."""


#: The latest call of each key. Keys tell apart what calls of a model differ in; whether they are alike, `_Call` says.
_CALLS: dict[Hashable, _Call] = {}

_MOST_CALLS = 4096


def _forget() -> None:
    for call in list(_CALLS.values()):
        call.backwards.clear()
    _CALLS.clear()


@functools.cache
def _backend() -> ModuleType:
    """Triton is imported on first use."""
    from stepgraph.kernels.norm.triton import again
    from stepgraph.kernels.norm.triton.config import tuning

    tuning.on_change(_forget)
    return again


def _launched(*tensors: Optional) -> bool:
    """Whether a call on these tensors is a launch, and no more: see `derivatives.is_plain`."""
    return derivatives.is_plain(*tensors) and tensors[0].is_cuda and tensors[0].numel() > 0


def _learn(key: Hashable, norm: Norm, x: Tensor, weight: Tensor, bias: Optional) -> _Call | None:
    """Keep the call for tensors alike to these, if it can be made again."""
    if not _launched(x, weight, bias, None):
        return None
    run = _backend().forward(norm, x, weight, bias)
    if run is None:
        return None
    if len(_CALLS) >= _MOST_CALLS:
        _CALLS.clear()
    tensors = (x, weight) if bias is None else (x, weight, bias)
    needs_gradients = any(tensor.requires_grad for tensor in tensors)
    call = _CALLS[key] = _Call(alike(*tensors), run, needs_gradients, (norm, x.dtype, None), {})
    return call


def _learn_backward(call: _Call, needs: tuple[bool, ...], dy: Tensor, *saved: Optional) -> _Backward | None:
    """Keep the backward for tensors alike to these, if dy is laid out as y."""
    x, weight, mean, rstd = saved
    norm, _, _ = call.described
    if not _launched(dy, x, weight, rstd):
        return None
    if dy.dtype is not norm.out_dtype or dy.shape != x.shape or not dy.is_contiguous():
        return None
    run = _backend().backward(norm, dy, x, weight, mean, rstd, needs[:3])
    back = call.backwards[needs] = _Backward(alike(dy, x, weight), run)
    return back


class _Again(torch.autograd.Function):
    """A `_Call` with its gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, call):
        y, mean, rstd = call.run(x, weight, bias)
        ctx.call = call
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx, dy):
        call, needs, saved = ctx.call, ctx.needs_input_grad, ctx.saved_tensors
        # Gradients are enabled where a second derivative is wanted.
        if dy is not None and in_plain_eager() and not torch.is_grad_enabled():
            back = call.backwards.get(needs) or _learn_backward(call, needs, dy, *saved)
            if back is not None and back.alike(dy, saved[0], saved[1]):
                return *back.run(dy, *saved), None
        dx, dw, db, _ = derivatives.gradients(call.described, needs, saved, dy, None)
        return dx, dw, db, None


# Python's `apply` first repeats checks that have been made, which takes microseconds.
_apply = super(torch.autograd.Function, _Again).apply


def norm(
    kind: str, x: Tensor, weight: Tensor, bias: Optional, eps: float | None, weight_offset: float,
    out_dtype: torch.dtype | None,
) -> Optional:  # fmt: skip
    """y of a plain eager call on a GPU, None for others. Raises ``ValueError`` as `spec.check` does."""
    if not in_plain_eager() or type(x) is not Tensor:
        return None
    key = (kind, x.numel(), weight.numel(), bias is None, eps, weight_offset, out_dtype)
    call = _CALLS.get(key)
    if call is None or not (call.alike(x, weight) if bias is None else call.alike(x, weight, bias)):
        call = _learn(key, described(kind, x, eps, weight_offset, out_dtype), x, weight, bias)
        if call is None:
            return None
    if call.gradients and torch.is_grad_enabled():
        return _apply(x, weight, bias, call)
    return call.run(x, weight, bias)[0]

"""Replaces operators that take a tape's numbers with ones that take tensors, bitwise equal.

A number that a graph holds would be the same in every step. One that a step computes (see
`stepgraph.capture.optimizer.tape`) is an input of the graph, a scalar tensor in fp64, as Python's numbers are; torch
rounds a number to the dtype that an operator computes in, fp32 for bf16 and fp16.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from stepgraph.errors import CaptureError
from stepgraph.kernels.add_scaled import add_scaled as add_on_cpu

Tensor = torch.Tensor
HALF = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that operators on it compute in."""
    return x.float() if x.dtype in HALF else x


def _alike(*tensors: Tensor) -> list[Tensor]:
    """``tensors`` in the dtype that an operator on all of them computes in."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(torch.float32 if dtype in HALF else dtype) for tensor in tensors]


def _binary(operation: Callable[[Tensor, Any], Tensor]) -> Callable:
    """An operation of a tensor and a scalar tensor, as of a tensor and a number."""

    def run(x: Tensor, y: Any) -> Tensor:
        if x.ndim == 0:  # two tensors without dimensions would promote to fp64
            return run(x.view(1), y).view(())
        if x.is_cuda and x.dtype in HALF:  # a CUDA operator would round the number to half precision
            return operation(wide(x), y).to(x.dtype)
        return operation(x, y)

    return run


_times, _over = _binary(torch.mul), _binary(torch.div)
_plus, _minus = _binary(torch.add), _binary(torch.sub)
_from = _binary(lambda x, y: torch.sub(y, x))


def scaled(x: Tensor, factor: Tensor | float, foreach: bool | None = False) -> Tensor:
    """``x * number``. ``foreach``: as ``torch._foreach_mul_``, which on a CPU rounds the number to half precision."""
    if foreach and x.dtype in HALF and not x.is_cuda:
        is_tensor = isinstance(factor, Tensor)
        return x * (factor.to(x.dtype) if is_tensor else torch.full((), factor, dtype=x.dtype))
    return _times(x, factor) if isinstance(factor, Tensor) else x * factor


def add_scaled(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """``torch.add(x, y, alpha=number)``: one multiply-add, which no operator on a CPU offers with a tensor factor."""
    if not x.is_cuda:
        return add_on_cpu(x, y, factor)
    total = wide(x)
    return torch.addcmul(total, y.to(total.dtype), factor.to(total.dtype)).to(x.dtype)


def add_quotient(x: Tensor, y: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """``torch.addcdiv(x, y, z, value=number)``, in each device's order: it rounds half precision once."""
    x_, y_, z_ = _alike(x, y, z)
    if x.is_cuda:
        return add_scaled(x_, y_ / z_, value).to(x.dtype)
    return (x_ + scaled(y_, value) / z_).to(x.dtype)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """``torch.lerp(start, end, number)``."""
    first = wide(start)
    return torch.lerp(first, wide(end), weight.to(first.dtype)).to(start.dtype)


def power(x: Tensor, exponent: float) -> Tensor:
    """Python's ``x ** exponent`` for an fp64 ``x``; torch's own takes ways around ``pow`` that round otherwise."""
    return torch.pow(x, torch.full_like(x, exponent))


def larger(number: float, x: Tensor) -> Tensor:
    """Python's ``max(number, x)``: the number where ``x`` is NaN."""
    return torch.where(x > number, x, number)


def smaller(x: Tensor, y: Tensor) -> Tensor:
    """Python's ``min(x, y)``: ``x`` where ``y`` is NaN."""
    return torch.where(y < x, y, x)


#: The scalar tensor of a number, on a device.
Factor = Callable[[Any, torch.device], Tensor]


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], factor: Factor, is_number: Callable) -> Any:
    """What ``func`` gives for arguments with numbers, which ``is_number`` names, in other operators. Raises
    ``CaptureError``: no other operator gives the same bits."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith("_foreach_"):
        return _one(name, args, kwargs, factor, is_number, False)
    name, n = name.removeprefix("_foreach_"), next(len(arg) for arg in args if isinstance(arg, list | tuple))
    results = []
    for i in range(n):  # tensor by tensor
        one = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
        results.append(_one(name, one, kwargs, factor, is_number, True))
    return None if func._schema.is_mutable else results


def _one(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], factor: Factor, is_number: Callable, foreach: bool
) -> Tensor:
    found = _FUNCTIONAL.get(name.removesuffix("_"))
    target = next((leaf for leaf in args if isinstance(leaf, Tensor)), None)
    exact = target is not None and not (target.is_floating_point() or target.is_complex())
    if found is None or (exact and name not in _ANY_DTYPE):
        raise unknown(name)
    device = target.device if target is not None else torch.device(kwargs.get("device") or "cpu")

    def tensor(value: Any) -> Any:
        return factor(value, device) if is_number(value) else value

    given, options = [tensor(arg) for arg in args], {key: tensor(value) for key, value in kwargs.items()}
    result = scaled(*given, foreach=True) if foreach and found is _mul else found(*given, **options)
    if result is NotImplemented:
        raise unknown(name)
    return target.copy_(result) if name.endswith("_") else result


def unknown(name: str) -> CaptureError:
    """For an operator that has no other form."""
    return CaptureError(
        f"{name} takes a number that changes from step to step, and no form of it with a tensor gives the same bits; "
        "multiply or add the number to a tensor before it"
    )


def _mul(x: Any, y: Any) -> Tensor:
    return scaled(x, y) if x.dtype != torch.float64 or x.ndim else scaled(y, x)


def _div(x: Tensor, y: Any, rounding_mode: str | None = None) -> Any:
    return NotImplemented if rounding_mode else _over(x, y)


def _add(x: Tensor, y: Any, alpha: Any = 1) -> Any:
    if isinstance(alpha, Tensor):
        return add_scaled(x, y, alpha) if isinstance(y, Tensor) and y.shape == x.shape else NotImplemented
    return _plus(x, y) if alpha == 1 else NotImplemented


def _sub(x: Tensor, y: Any, alpha: Any = 1) -> Any:
    if isinstance(alpha, Tensor):
        return add_scaled(x, y, -alpha) if isinstance(y, Tensor) and y.shape == x.shape else NotImplemented
    return _minus(x, y) if alpha == 1 else NotImplemented


def _rsub(x: Tensor, y: Any, alpha: Any = 1) -> Any:
    return _from(x, y) if not isinstance(alpha, Tensor) and alpha == 1 else NotImplemented


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Any = 1) -> Tensor:
    x_, y_, z_ = _alike(x, y, z)
    return torch.addcmul(x_, scaled(y_, value), z_).to(x.dtype)


def _pow(x: Any, y: Any) -> Any:
    return torch.pow(x, y) if x.ndim == 0 and isinstance(y, Tensor) and x.dtype == torch.float64 else NotImplemented


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    like = {"dtype": x.dtype, "device": x.device}
    low, high = (torch.full((), b, **like) if isinstance(b, int | float) else b for b in (min, max))
    return torch.clamp(x, low, high)


def _fill(x: Tensor, y: Tensor) -> Tensor:
    return y.to(x.dtype).expand(x.shape)


def _full(size: Sequence[int], value: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return value.to(dtype or torch.get_default_dtype()).expand(size).clone()


def _full_like(x: Tensor, value: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return scaled(torch.ones_like(x, dtype=dtype), value)


def _compared(operation: Callable) -> Callable:
    return lambda x, y: operation(x, y.to(x.dtype))


_FUNCTIONAL: dict[str, Callable] = {
    "mul": _mul,
    "div": _div,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "addcmul": _addcmul,
    "addcdiv": add_quotient,
    "lerp": lerp,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda x, y: _clamp(x, min=y),
    "clamp_max": lambda x, y: _clamp(x, max=y),
    "maximum": lambda x, y: _clamp(x, min=y),
    "minimum": lambda x, y: _clamp(x, max=y),
    "fill": _fill,
    "full": _full,
    "full_like": _full_like,
    "new_full": lambda x, size, value, dtype=None, **_: _full(size, value, dtype or x.dtype),
    "scalar_tensor": lambda value, dtype=None, **_: value.to(dtype or torch.get_default_dtype()),
    **{name: _compared(getattr(torch, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
}
_ANY_DTYPE = ("full_like", "new_full", "fill_")

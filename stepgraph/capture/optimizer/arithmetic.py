"""Arithmetic with tensors as factors where eager has numbers, bit for bit.

The factors are 0-dimensional and fp64, as Python's numbers are; torch rounds a number to the dtype that an operator
computes in, which for bf16 and fp16 is fp32.
"""

import torch

from stepgraph.kernels.optimizer import add_scaled as add_on_cpu

HALF = (torch.bfloat16, torch.float16)


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that operators on it compute in."""
    return x.float() if x.dtype in HALF else x


def scaled(x: torch.Tensor, factor: torch.Tensor | float, foreach: bool | None = False) -> torch.Tensor:
    """``x * number``. ``foreach``: as ``torch._foreach_mul_``, which on a CPU rounds the number to half precision."""
    if foreach and x.dtype in HALF and not x.is_cuda:
        is_tensor = isinstance(factor, torch.Tensor)
        return x * (factor.to(x.dtype) if is_tensor else torch.full((), factor, dtype=x.dtype))
    if not isinstance(factor, torch.Tensor):
        return x * factor
    if x.ndim == 0:  # two tensors without dimensions would promote to fp64
        return scaled(x.view(1), factor).view(())
    if x.is_cuda and x.dtype in HALF:  # a CUDA operator would round the factor to bf16
        return (wide(x) * factor).to(x.dtype)
    return x * factor


def divided(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """``x / number``."""
    if x.ndim == 0:
        return divided(x.view(1), divisor).view(())
    if x.is_cuda and x.dtype in HALF:
        return (wide(x) / divisor).to(x.dtype)
    return x / divisor


def add_scaled(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``torch.add(x, y, alpha=number)``: one multiply-add, which no operator on a CPU offers with a tensor factor."""
    if not x.is_cuda:
        return add_on_cpu(x, y, factor)
    total = wide(x)
    return torch.addcmul(total, y.to(total.dtype), factor.to(total.dtype)).to(x.dtype)


def add_quotient(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``torch.addcdiv(x, y, z, value=number)``, in the order of each device: it rounds half precision once, at the
    end."""
    x_, y_, z_ = wide(x), wide(y), wide(z)
    if x.is_cuda:
        return add_scaled(x_, y_ / z_, value).to(x.dtype)
    return (x_ + scaled(y_, value) / z_).to(x.dtype)


def lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``torch.lerp(start, end, number)``."""
    first = wide(start)
    return torch.lerp(first, wide(end), weight.to(first.dtype)).to(start.dtype)


def power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """Python's ``x ** exponent`` for an fp64 ``x``; torch's own takes ways around ``pow`` that round otherwise."""
    return torch.pow(x, torch.full_like(x, exponent))


def larger(number: float, x: torch.Tensor) -> torch.Tensor:
    """Python's ``max(number, x)``: the number where ``x`` is NaN."""
    return torch.where(x > number, x, number)


def smaller(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Python's ``min(x, y)``: ``x`` where ``y`` is NaN."""
    return torch.where(y < x, y, x)

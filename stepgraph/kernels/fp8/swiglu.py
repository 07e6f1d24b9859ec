"""SwiGLU, and its backward, with what casts of their results to fp8 need, in one kernel.

    y      = silu(gate) * up, rounded to the inputs' dtype after each of the two, as separate operators do
    dup    = dy * silu(gate)
    dgate  = silu'(gate) * (dy * up), rounded in the same way
    q, s   = by rows in fp8, and their scales: `cast.cast_scaled_rows` of y, or of both gradients
    magnitudes of rows: max |y| over each row; of columns: over each column

A row is complete in one program, so its cast reads nothing again; y and the gradients themselves are written only for
the ones that read them. One scale, or a scale for each column, is known only once every row is: there the kernel gives
magnitudes, and the cast (`cast.cast_by_magnitudes`) reads the matrix once, not twice.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from collections.abc import Callable

import torch

from stepgraph.kernels.fp8.cast import rows_reference
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate) * up).contiguous()


def _gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Those of gate and of up."""
    return torch.ops.aten.silu_backward(dy * up, gate).contiguous(), _product(gate, dy)


def reference(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_cast_rows` in plain torch."""
    y = _product(gate, up)
    q, scale, _, _ = rows_reference(y.view(-1, y.shape[-1]), dtype, True, False)
    return y if keep else y.new_empty(0), q, scale


def backward_reference(
    dy: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool, cast_rows: Callable = rows_reference
) -> tuple[Tensor, ...]:
    """`swiglu_backward_cast_rows` in plain torch, which casts by ``cast_rows``."""
    both = _gradients(dy, gate, up)
    casts = [cast_rows(t.view(-1, t.shape[-1]), dtype, True, False)[:2] for t in both]
    return *(t if keep else t.new_empty(0) for t in both), *casts[0], *casts[1]


def empty_results(like: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, ...]:
    """Tensors for two results in the form of ``like``, then for their casts and scales in turn."""
    columns = like.shape[-1]
    rows = like.numel() // columns
    kept = [like.new_empty(like.shape if keep else (0,)) for _ in range(2)]
    casts = [(like.new_empty(rows, columns, dtype=dtype), like.new_empty(rows, dtype=torch.float32)) for _ in range(2)]
    return *kept, *casts[0], *casts[1]


@operator(
    lambda gate, _, *options: empty_results(gate, *options)[1:4],
    launch="fp8.swiglu_triton:launch",
)
def swiglu_cast_rows(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``silu(gate) * up``, cast to fp8 with a scale for each row.

    Args:
        gate, up: (..., C), not empty; both bf16, fp16 or fp32, in any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        keep: whether to return the product too.

    Returns:
        The product, contiguous, in the shape and dtype of ``gate``, empty without ``keep``; (R, C) in ``dtype``, R the
        number of rows, and its scales, (R,) fp32.
    """
    return reference(gate, up, dtype, keep)


@operator(
    lambda dy, gate, _, *options: empty_results(gate, *options),
    launch="fp8.swiglu_triton:launch_backward",
)
def swiglu_backward_cast_rows(
    dy: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``silu(gate) * up``, cast to fp8 with a scale for each row.

    Args:
        dy, gate, up: (..., C), not empty; all bf16, fp16 or fp32, in any strides. ``dy``: the gradient of the product.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        keep: whether to return the gradients too.

    Returns:
        The gradients of ``gate`` and ``up``, contiguous, in the shape and dtype of ``gate``, empty without ``keep``;
        of each in turn (R, C) in ``dtype``, R the number of rows, and its scales, (R,) fp32.
    """
    return backward_reference(dy, gate, up, dtype, keep)


def _magnitudes(x: Tensor, columns: bool) -> tuple[Tensor, Tensor]:
    x = x.view(-1, x.shape[-1]).abs()
    return x.amax(1).float(), (x.amax(0) if columns else x.new_empty(0)).float()


def _empty(like: Tensor, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    C = like.shape[-1]
    rows, across = (like.new_empty(n, dtype=torch.float32) for n in (like.numel() // C, C if columns else 0))
    return like.new_empty(like.shape), rows, across


def _like_backward(dy: Tensor, gate: Tensor, up: Tensor, columns: bool) -> tuple[Tensor, ...]:
    (dgate, *of_gate), (dup, *of_up) = _empty(gate, columns), _empty(gate, columns)
    return dgate, dup, *of_gate, *of_up


@operator(
    lambda gate, _, columns: _empty(gate, columns), launch="fp8.swiglu_triton:launch_magnitudes",
)  # fmt: skip
def swiglu_magnitudes(gate: Tensor, up: Tensor, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``silu(gate) * up`` and its largest magnitudes.

    Args:
        gate, up: (..., C), not empty; both bf16, fp16 or fp32, in any strides.
        columns: whether to find the columns' too.

    Returns:
        The product, contiguous, in the shape and dtype of ``gate``; the magnitudes of its rows, (R,) fp32, R the number
        of rows, and of its columns, (C,) fp32, empty without ``columns``. NaN where one is among the values.
    """
    y = _product(gate, up)
    return y, *_magnitudes(y, columns)


@operator(
    _like_backward, launch="fp8.swiglu_triton:launch_backward_magnitudes",
)  # fmt: skip
def swiglu_backward_magnitudes(
    dy: Tensor, gate: Tensor, up: Tensor, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``silu(gate) * up`` and their largest magnitudes.

    Args:
        dy, gate, up: (..., C), not empty; all bf16, fp16 or fp32, in any strides. ``dy``: the gradient of the product.
        columns: whether to find the magnitudes of columns too.

    Returns:
        The gradients of ``gate`` and ``up``, as the product of `swiglu_magnitudes`; then of each in turn the magnitudes
        of its rows and of its columns, as there.
    """
    dgate, dup = _gradients(dy, gate, up)
    return dgate, dup, *_magnitudes(dgate, columns), *_magnitudes(dup, columns)

"""SwiGLU, and its backward, with their casts to fp8 in one kernel.

    y      = silu(gate) * up, rounded to the inputs' dtype after each of the two, as separate operators do
    dup    = dy * silu(gate)
    dgate  = silu'(gate) * (dy * up), rounded in the same way
    q, s   = by rows in fp8, and their scales: `cast.cast_scaled_rows` of y, or of both gradients

A row is complete in one program, so its cast reads nothing again; y and the gradients themselves are written only for
the ones that read them.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from collections.abc import Callable

import torch

from stepgraph.kernels.fp8.cast import rows_reference
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def reference(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_cast_rows` in plain torch."""
    y = (torch.nn.functional.silu(gate) * up).contiguous()
    q, scale, _, _ = rows_reference(y.view(-1, y.shape[-1]), dtype, True, False)
    return y if keep else y.new_empty(0), q, scale


def backward_reference(
    dy: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool, cast_rows: Callable = rows_reference
) -> tuple[Tensor, ...]:
    """`swiglu_backward_cast_rows` in plain torch, which casts by ``cast_rows``."""
    dgate = torch.ops.aten.silu_backward(dy * up, gate)
    both = dgate.contiguous(), (dy * torch.nn.functional.silu(gate)).contiguous()
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

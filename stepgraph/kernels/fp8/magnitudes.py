"""SwiGLU and its backward, with the largest magnitudes of their results for a cast to fp8, and that cast.

    y      = silu(gate) * up, rounded to the inputs' dtype after each of the two, as separate operators do
    dup    = dy * silu(gate)
    dgate  = silu'(gate) * (dy * up), rounded in the same way
    magnitudes of rows: max |y| over each row; of columns: over each column

One scale, or a scale for each column, is known only once every row is: what makes a matrix finds the magnitudes while
it has the values, and the cast reads the matrix once, not twice. `stepgraph.kernels.fp8.swiglu` casts rows by
themselves, which need not be read again at all.
"""

import torch

from stepgraph.kernels.fp8 import cast
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


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


def _like_casts(x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, transposed = (x.new_empty(shape, dtype=dtype) for shape in (x.shape, x.shape[::-1]))
    return q, torch.empty_like(of_rows), transposed, torch.empty_like(of_columns)


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
    y = (torch.nn.functional.silu(gate) * up).contiguous()
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
    dgate = torch.ops.aten.silu_backward(dy * up, gate).contiguous()
    dup = (dy * torch.nn.functional.silu(gate)).contiguous()
    return dgate, dup, *_magnitudes(dgate, columns), *_magnitudes(dup, columns)


@operator(_like_casts, launch="fp8.cast_triton:launch_by_magnitudes")
def cast_by_magnitudes(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_scaled_rows` of ``x`` by rows and by columns, whose largest magnitudes are known.

    Args:
        x: (R, C), not empty; bf16, fp16 or fp32, in any strides.
        of_rows, of_columns: (R,) and (C,) fp32, contiguous.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        As `cast_scaled_rows`.
    """
    results = []
    for side, amax in ((x, of_rows), (x.t(), of_columns)):
        scale, factor = cast.scale_of(amax, dtype)
        results += [cast.rounded(side, factor.unsqueeze(1), dtype), scale]
    return tuple(results)

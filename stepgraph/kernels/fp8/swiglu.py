"""SwiGLU with its cast to fp8 in one kernel.

    y     = silu(gate) * up, rounded to the inputs' dtype after each of the two, as apart
    q, s  = y by rows in fp8, and their scales: `cast.cast_scaled_rows` of y

A row of y is complete in one program, so its cast reads nothing again; y itself is written only for those that read it.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

import torch

from stepgraph.kernels.ahead import launching
from stepgraph.kernels.fp8.cast import rows_reference
from stepgraph.kernels.fp8.formats import MOST

Tensor = torch.Tensor


def reference(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_cast_rows` in plain torch."""
    y = (torch.nn.functional.silu(gate) * up).contiguous()
    q, scale, _, _ = rows_reference(y.view(-1, y.shape[-1]), dtype, True, False)
    return y if keep else y.new_empty(0), q, scale


@torch.library.custom_op("stepgraph::swiglu_cast_rows", mutates_args=())
@launching("swiglu_cast_rows")
def swiglu_cast_rows(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``silu(gate) * up``, cast to fp8 with a scale for each row.

    Args:
        gate, up: (..., C), not empty; both bf16, fp16 or fp32, in any strides.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        keep: whether to return the product too.

    Returns:
        The product, contiguous, in the shape and dtype of ``gate``, empty without ``keep``; (R, C) in ``dtype``, R the
        number of rows, and its scales, (R,) fp32.

    Raises ``ValueError`` for other shapes and dtypes.
    """
    _check(gate, up, dtype)
    if gate.is_cuda:
        from stepgraph.kernels.fp8 import swiglu_triton

        return swiglu_triton.launch(gate, up, dtype, keep)
    return reference(gate, up, dtype, keep)


@swiglu_cast_rows.register_fake
def _(gate: Tensor, up: Tensor, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check(gate, up, dtype)
    columns = gate.shape[-1]
    rows = gate.numel() // columns
    y = gate.new_empty(gate.shape if keep else (0,))
    return y, gate.new_empty(rows, columns, dtype=dtype), gate.new_empty(rows, dtype=torch.float32)


def _check(gate: Tensor, up: Tensor, dtype: torch.dtype) -> None:
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.is_floating_point()
    if not alike or not gate.ndim or dtype not in MOST:
        raise ValueError(
            f"swiglu_cast_rows got a gate {gate.dtype} {tuple(gate.shape)}, an up {up.dtype} {tuple(up.shape)} and "
            f"{dtype}; allowed are floating-point tensors of one shape and dtype, to float8_e4m3fn or float8_e5m2: "
            "convert one of them, or choose one of the two"
        )

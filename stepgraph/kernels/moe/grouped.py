"""One product for the rows of all experts, and its gradients.

    grouped_mm:          y[r] = rows[r] @ weight[e]      for the rows r of expert e: offsets[e - 1] <= r < offsets[e]
    grouped_mm_weight:   dw[e] = sum over its rows r of rows[r]^T dy[r]

Rows past the last offset belong to no expert: nothing reads them, and they are zero in the result, or hold anything
where the pass `unread_rows` found that nothing reads them there either. In bf16 on a GPU of compute capability 9 or 10
the products are torch's own, whose results are uninitialized there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels import quack
from stepgraph.kernels.ahead import launching
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def on_device(x: Tensor) -> bool:
    """Whether groups of rows like ``x`` are multiplied without their sizes on the host. Where there is no GPU, fake
    tensors count as of one that can."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def reference(rows: Tensor, weight: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """`grouped_mm` in plain torch: one product an expert. On a GPU the host waits for the offsets."""
    out, start = (rows.new_zeros if zero_rest else rows.new_empty)(rows.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = rows[start:end] @ weight[expert]
        start = end
    return out


def weight_reference(rows: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_mm_weight` in plain torch: one product an expert. On a GPU the host waits for the offsets."""
    out, start = rows.new_zeros(offsets.shape[0], rows.shape[1], dy.shape[1]), 0
    for expert, end in enumerate(offsets.tolist()):
        out[expert] = rows[start:end].t() @ dy[start:end]
        start = end
    return out


def _check(rows: Tensor, weight: Tensor, offsets: Tensor, _: bool = True) -> None:
    right = rows.ndim == 2 and weight.ndim == 3 and rows.shape[1] == weight.shape[1] and rows.dtype == weight.dtype
    if not (right and rows.is_floating_point() and offsets.dtype == torch.int32 and offsets.shape == weight.shape[:1]):
        raise ValueError(
            f"grouped_mm got rows {_form(rows)}, weight {_form(weight)}, offsets {_form(offsets)}; allowed is rows "
            "(R, D), weight (E, D, F) of the same floating dtype, offsets int32 (E,): transpose or cast what differs"
        )
    _check_widths(rows, *weight.shape[1:])


def _check_weight(rows: Tensor, dy: Tensor, offsets: Tensor) -> None:
    right = rows.ndim == dy.ndim == 2 and rows.shape[0] == dy.shape[0] and rows.dtype == dy.dtype
    if not (right and rows.is_floating_point() and offsets.dtype == torch.int32 and offsets.ndim == 1):
        raise ValueError(
            f"grouped_mm_weight got rows {_form(rows)}, dy {_form(dy)}, offsets {_form(offsets)}; allowed is rows "
            "(R, D), dy (R, F) of the same floating dtype, offsets int32 (E,): pass what grouped_mm got"
        )
    _check_widths(rows, rows.shape[1], dy.shape[1])


def _check_widths(rows: Tensor, inner: int, outer: int) -> None:
    if on_device(rows) and (inner % 8 or outer % 8):
        raise ValueError(
            f"grouped_mm got matrices of {inner} x {outer} in bf16 on a GPU; allowed are multiples of 8 (16 bytes): "
            "pad the experts' widths"
        )


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


@operator(lambda rows, weight, *_: rows.new_empty(rows.shape[0], weight.shape[2]), check=_check)
def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """Multiply the rows of each expert with its matrix.

    Args:
        rows: (R, D), sorted by expert; fp32, bf16 or fp16, on a CPU fp64 too.
        weight: (E, D, F), the dtype of ``rows``, in any strides: ``stored.mT`` for parameters of (E, F, D).
        offsets: (E,) int32, the end of each expert's rows: ``counts.cumsum(0, dtype=torch.int32)``.
        zero_rest: False leaves rows past ``offsets[-1]`` as they are in memory.

    Returns:
        (R, F), contiguous, in the dtype of ``rows``; rows past ``offsets[-1]`` are zero, and so is their gradient.

    Raises ``ValueError`` for other shapes and dtypes. In bf16 on a GPU of compute capability 9 or 10 D and F must be
    multiples of 8, and the host does not wait for the GPU; elsewhere it waits for the offsets, and the reference is
    what runs.
    """
    if not rows.numel() or not weight.numel():
        return rows.new_zeros(rows.shape[0], weight.shape[2])
    if not on_device(rows):
        return reference(rows, weight, offsets, zero_rest)
    out = F.grouped_mm(quack.dense(rows), quack.dense(weight), offs=offsets).contiguous()
    return _zero_past(out, offsets) if zero_rest else out


def _zero_past(out: Tensor, offsets: Tensor) -> Tensor:
    from stepgraph.kernels.moe.grouped_triton import zero_past

    with torch.cuda.device(out.device):
        return zero_past(out, offsets)


@launching("grouped_mm")
def _launch(rows: Tensor, weight: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """Run the kernel that `grouped_mm` launches besides the product, the only part that needs addresses."""
    if not zero_rest or not rows.numel() or not weight.numel() or not on_device(rows):
        return rows
    return _zero_past(rows.new_empty(rows.shape[0], weight.shape[2]), offsets)


@operator(
    lambda rows, dy, offsets, *_: rows.new_empty(offsets.shape[0], rows.shape[1], dy.shape[1]), check=_check_weight
)
def grouped_mm_weight(rows: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the matrices of `grouped_mm`.

    Args:
        rows: (R, D), what `grouped_mm` got; fp32, bf16 or fp16, on a CPU fp64 too.
        dy: (R, F), the gradient of what it gave, in the same dtype.
        offsets: (E,) int32, the end of each expert's rows.

    Returns:
        (E, D, F), contiguous, in the dtype of ``rows``; zeros for an expert without rows.

    Raises ``ValueError`` as `grouped_mm`.
    """
    if not rows.numel() or not dy.numel():
        return rows.new_zeros(offsets.shape[0], rows.shape[1], dy.shape[1])
    if not on_device(rows):
        return weight_reference(rows, dy, offsets)
    return F.grouped_mm(quack.dense(rows).t(), quack.dense(dy), offs=offsets).contiguous()


# Gradients


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, offsets = ctx.saved_tensors
    need_rows, need_weight, *_ = ctx.needs_input_grad
    drows = grouped_mm(grad, weight.mT, offsets) if need_rows else None
    return drows, _weight_gradient(rows, weight, grad, offsets) if need_weight else None, None, None


def _weight_gradient(rows: Tensor, weight: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of ``weight``, laid out in memory as that is: a transposed parameter gets it without a copy."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return grouped_mm_weight(grad, rows, offsets).mT
    return grouped_mm_weight(rows, grad, offsets)


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, dy, offsets = ctx.saved_tensors
    need_rows, need_dy, *_ = ctx.needs_input_grad
    drows = grouped_mm(dy, grad.mT, offsets) if need_rows else None
    return drows, grouped_mm(rows, grad, offsets) if need_dy else None, None


grouped_mm.register_autograd(_gradient, setup_context=_save)
grouped_mm_weight.register_autograd(_gradient_of_gradient, setup_context=_save)


# Multiplications and additions as `torch.utils.flop_counter` counts them, had every row an expert.


register_flop_formula(torch.ops.stepgraph.grouped_mm)(
    lambda rows_shape, weight_shape, *_, **__: 2 * rows_shape[0] * rows_shape[1] * weight_shape[2]
)
register_flop_formula(torch.ops.stepgraph.grouped_mm_weight)(
    lambda rows_shape, dy_shape, *_, **__: 2 * rows_shape[0] * rows_shape[1] * dy_shape[1]
)

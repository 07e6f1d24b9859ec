"""SwiGLU of expert rows, and its backward, only on the rows in use.

    y            = silu(gate) * up, rounded to the inputs' dtype after each of the two, as separate operators do
    dgate | dup  = silu'(gate) * (dy * up) | dy * silu(gate), rounded in the same way; halves of one matrix

Gate and up are the halves of one product's rows, and so are their gradients. Each is read once and each result written
once. Rows past the last offset belong to no expert: nothing reads them, and they are zero in the result, or hold
anything where the pass `unread_rows` found that nothing reads them there either.

`swiglu_rows_cast` and its backward give the same values as packed rows of fp8 (see `packed`), from one kernel.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from typing import Any

import torch

from stepgraph.kernels.moe.packed import new_packed
from stepgraph.kernels.moe.scaled import cast_packed_rows
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
aten = torch.ops.aten

#: What the kernels take; in other dtypes the reference is what runs.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def reference(gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """`swiglu_rows` in plain torch."""
    gate, up = gate_up.chunk(2, 1)
    out = torch.nn.functional.silu(gate) * up
    return _zeros_past(out, offsets) if zero_rest else out


def backward_reference(dy: Tensor, gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """`swiglu_rows_backward` in plain torch."""
    gate, up = gate_up.chunk(2, 1)
    halves = aten.silu_backward(dy * up, gate), dy * torch.nn.functional.silu(gate)
    out = torch.cat(halves, 1)
    return _zeros_past(out, offsets) if zero_rest else out


def _zeros_past(x: Tensor, offsets: Tensor) -> Tensor:
    """``x``, contiguous, with zeros past the last offset, which stays on the device."""
    past = torch.arange(x.shape[0], device=x.device) >= offsets[-1]
    return x.masked_fill(past.unsqueeze(1), 0.0).contiguous()


def _on_gpu(x: Tensor) -> bool:
    """Whether the kernels run, not the reference."""
    return x.is_cuda and x.dtype in _DTYPES


@operator(
    lambda gate_up, *_: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    launch="moe.swiglu_triton:launch", takes=_on_gpu,
)  # fmt: skip
def swiglu_rows(gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """``silu(gate) * up`` for the rows of experts.

    Args:
        gate_up: (R, 2F), gate in the first F columns and up in the others; fp32, bf16 or fp16, fp64 by the reference.
        offsets: (E,) int32, the end of each expert's rows, of one expert or more.
        zero_rest: False leaves rows past ``offsets[-1]`` of the result as they are in memory.

    Returns:
        (R, F), contiguous, in the dtype of ``gate_up``; rows past ``offsets[-1]`` are zero, and so is their gradient.

    Deterministic, and the host does not wait for the GPU.
    """
    return reference(gate_up, offsets, zero_rest)


@operator(
    lambda dy, gate_up, *_: gate_up.new_empty(gate_up.shape),
    launch="moe.swiglu_triton:launch_backward", takes=_on_gpu,
)  # fmt: skip
def swiglu_rows_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """The gradient of the input of `swiglu_rows`; it has no gradient itself.

    Args:
        dy: (R, F), the gradient of its result, in the dtype of ``gate_up``.
        gate_up: (R, 2F), what it got.
        offsets: (E,) int32, the end of each expert's rows, of one expert or more.
        zero_rest: False leaves rows past ``offsets[-1]`` of the result as they are in memory.

    Returns:
        (R, 2F), contiguous, in the dtype of ``gate_up``: the gradient of gate in the first F columns, that of up in the
        others; rows past ``offsets[-1]`` are zero.

    Deterministic, and the host does not wait for the GPU.
    """
    return backward_reference(dy, gate_up, offsets, zero_rest)


def _like_cast(gate_up: Tensor, columns: int, keep: bool) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty((gate_up.shape[0], columns) if keep else 0), new_packed(gate_up, columns)


@operator(
    lambda gate_up, _, keep: _like_cast(gate_up, gate_up.shape[1] // 2, keep),
    launch="moe.swiglu_triton:launch_cast", takes=_on_gpu,
)  # fmt: skip
def swiglu_rows_cast(gate_up: Tensor, offsets: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """``cast_packed_rows(swiglu_rows(gate_up, offsets))`` for the rows of experts. It has no gradient.

    Args:
        gate_up: (R, 2F), not empty, as of `swiglu_rows`; 16 divides F.
        offsets: (E,) int32, the end of each expert's rows, of one expert or more.
        keep: whether to return the product too.

    Returns:
        The product, (R, F) in the dtype of ``gate_up``, empty without ``keep``; the packed rows, (R, F + TAIL) uint8.
        Rows past ``offsets[-1]`` hold anything.
    """
    return with_cast(swiglu_rows(gate_up, offsets), keep)


@operator(
    lambda dy, gate_up, _, keep: _like_cast(gate_up, gate_up.shape[1], keep),
    launch="moe.swiglu_triton:launch_cast_backward", takes=_on_gpu,
)  # fmt: skip
def swiglu_rows_cast_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """``cast_packed_rows(swiglu_rows_backward(dy, gate_up, offsets))`` for the rows of experts.

    Args:
        dy: (R, F), not empty, the gradient of the product, in the dtype of ``gate_up``.
        gate_up, offsets: as of `swiglu_rows_cast`.
        keep: whether to return the gradients too.

    Returns:
        The gradients, (R, 2F) in the dtype of ``gate_up``, empty without ``keep``; the packed rows, (R, 2F + TAIL)
        uint8: one scale for both gradients of a row. Rows past ``offsets[-1]`` hold anything.
    """
    return with_cast(swiglu_rows_backward(dy, gate_up, offsets), keep)


def with_cast(y: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """``y`` if it is to be kept, and its packed rows, by a kernel of their own."""
    return (y if keep else y.new_empty(0)), cast_packed_rows(y)


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return swiglu_rows_backward(grad, *ctx.saved_tensors), None, None


swiglu_rows.register_autograd(_gradient, setup_context=_save)

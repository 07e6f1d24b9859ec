"""SwiGLU of the experts' rows, and its backward, on the rows in use alone.

    y            = silu(gate) * up, rounded to the inputs' dtype after each of the two, as separate operators do
    dgate | dup  = silu'(gate) * (dy * up) | dy * silu(gate), rounded in the same way; halves of one matrix

Gate and up are the halves of one product's rows, and so are their gradients. Each is read once and each result written
once. Rows past the last offset belong to no expert: nothing reads them, and they are zero in the result, or hold
anything where the pass `unread_rows` found that nothing reads them there either.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from typing import Any

import torch

from stepgraph.kernels.ahead import launching

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


def _on_gpu(x: Tensor) -> Any:
    """The kernels where ``x`` lives; None where the reference runs."""
    if not x.is_cuda or x.dtype not in _DTYPES:
        return None
    from stepgraph.kernels.moe import swiglu_triton

    return swiglu_triton


@torch.library.custom_op("stepgraph::swiglu_rows", mutates_args=())
@launching("swiglu_rows")
def swiglu_rows(gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """``silu(gate) * up`` for the rows of experts.

    Args:
        gate_up: (R, 2F), gate in the first F columns and up in the others; fp32, bf16 or fp16, fp64 by the reference.
        offsets: (E,) int32, the end of each expert's rows, of one expert or more.
        zero_rest: False leaves rows past ``offsets[-1]`` of the result as they are in memory.

    Returns:
        (R, F), contiguous, in the dtype of ``gate_up``; rows past ``offsets[-1]`` are zero, and so is their gradient.

    Raises ``ValueError`` for other shapes and dtypes. Deterministic, and the host does not wait for the GPU.
    """
    _check("swiglu_rows", gate_up, offsets)
    kernels = _on_gpu(gate_up)
    if kernels is None:
        return reference(gate_up, offsets, zero_rest)
    with torch.cuda.device(gate_up.device):
        return kernels.launch(gate_up, offsets, zero_rest)


@torch.library.custom_op("stepgraph::swiglu_rows_backward", mutates_args=())
@launching("swiglu_rows_backward")
def swiglu_rows_backward(dy: Tensor, gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    """The gradient of what `swiglu_rows` got; it has none itself.

    Args:
        dy: (R, F), the gradient of what it gave, in the dtype of ``gate_up``.
        gate_up: (R, 2F), what it got.
        offsets: (E,) int32, the end of each expert's rows, of one expert or more.
        zero_rest: False leaves rows past ``offsets[-1]`` of the result as they are in memory.

    Returns:
        (R, 2F), contiguous, in the dtype of ``gate_up``: the gradient of gate in the first F columns, that of up in the
        others; rows past ``offsets[-1]`` are zero.

    Raises ``ValueError`` as `swiglu_rows`. Deterministic, and the host does not wait for the GPU.
    """
    _check("swiglu_rows_backward", gate_up, offsets, dy)
    kernels = _on_gpu(gate_up)
    if kernels is None:
        return backward_reference(dy, gate_up, offsets, zero_rest)
    with torch.cuda.device(gate_up.device):
        return kernels.launch_backward(dy, gate_up, offsets, zero_rest)


@swiglu_rows.register_fake
def _(gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    _check("swiglu_rows", gate_up, offsets)
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@swiglu_rows_backward.register_fake
def _(dy: Tensor, gate_up: Tensor, offsets: Tensor, zero_rest: bool = True) -> Tensor:
    _check("swiglu_rows_backward", gate_up, offsets, dy)
    return gate_up.new_empty(gate_up.shape)


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return swiglu_rows_backward(grad, *ctx.saved_tensors), None, None


swiglu_rows.register_autograd(_gradient, setup_context=_save)


def _check(name: str, gate_up: Tensor, offsets: Tensor, dy: Tensor | None = None) -> None:
    right = (
        gate_up.ndim == 2
        and gate_up.shape[1] % 2 == 0
        and gate_up.is_floating_point()
        and offsets.dtype == torch.int32
        and offsets.ndim == 1
        and offsets.shape[0] > 0
        and (dy is None or (dy.dtype == gate_up.dtype and dy.shape == (gate_up.shape[0], gate_up.shape[1] // 2)))
    )
    if right:
        return
    given = {"dy": dy, "gate_up": gate_up, "offsets": offsets}
    texts = [f"{key} {t.dtype} {tuple(t.shape)}" for key, t in given.items() if t is not None]
    raise ValueError(
        f"{name} got {', '.join(texts)}; allowed is gate_up (R, 2F) of a floating dtype, offsets int32 (E,) of one "
        "expert or more, dy (R, F) in the dtype of gate_up: pass a grouped product of gate and up, and its offsets"
    )

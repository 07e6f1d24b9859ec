"""The fake tensors that a step is traced with: shapes without values, in the memory layout of the real tensors.

Optimizers read memory linearly, and views depend on its order, so a trace must know if a gradient is transposed in
memory. For some operators torch's fake kernels give another layout than the real ones.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph import compat
from stepgraph.kernels import recurrent

aten = torch.ops.aten

#: Operators whose fake kernels give another memory layout than the real ones if the layouts of their inputs differ
#: (torch 2.11 to 2.13). The real ones follow these arguments in turn, this argument, or none (contiguous).
_BY_ARGUMENTS = {
    aten.elu_backward.default: ("grad_output", "self_or_result"),
    aten.softplus_backward.default: ("grad_output", "self"),
    aten.hardtanh_backward.default: ("grad_output", "self"),
    aten.hardswish_backward.default: ("grad_output", "self"),
    aten.hardsigmoid_backward.default: ("grad_output", "self"),
    aten.logit_backward.default: ("grad_output", "self"),
    aten.leaky_relu_backward.default: ("self", "grad_output"),
    aten.threshold_backward.default: ("self", "grad_output"),
    aten.xlogy.Tensor: ("self", "other"),
    aten.rsub.Tensor: ("other", "self"),
    aten.copysign.Tensor: ("self", "other"),
    aten.div.Tensor_mode: ("self", "other"),
    aten.native_dropout_backward.default: ("grad_output", "mask"),
}
_LIKE = {
    aten.huber_loss.default: "self",
    aten.binary_cross_entropy.default: "self",
    aten.binary_cross_entropy_backward.default: "self",
}
_CONTIGUOUS = {
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
}

#: bf16 only by torch's fake kernel, and unpadded in builds without CUDA.
_GROUPED = aten._grouped_mm.default

#: On a CPU only; the GPU kernel keeps its argument's layout, as the fake one does.
_CONTIGUOUS_ON_CPU = {aten.log_sigmoid_forward.default}

#: On a CPU only: contiguous, or channels last where this argument is.
_CHANNELS_LAST_OR_CONTIGUOUS_ON_CPU = {
    aten.native_batch_norm.default: "input",
    aten.native_batch_norm_backward.default: "input",
}

_HALF = (torch.bfloat16, torch.float16)
#: Pointwise without torch's tag, if not reduced; and with it, though the result lies as a copy of its first argument.
_UNTAGGED = {aten.mish_backward.default, aten.mse_loss.default, aten.smooth_l1_loss.default}
_COPIES = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}

_VIEWS = (aten.view.default, aten._unsafe_view.default)

_KNOWN = (_BY_ARGUMENTS, _LIKE, _CONTIGUOUS, _CONTIGUOUS_ON_CPU, _CHANNELS_LAST_OR_CONTIGUOUS_ON_CPU)


def fake_mode(open_sizes: bool = False) -> compat.FakeTensorMode:
    """A fake mode for capture: static shapes; real tensors that the step reads become constants of the graph.

    ``open_sizes``: its tensors may have them.
    """
    # Else no shape environment, which may invent symbols for the value of `.item()` and for the size of `nonzero`.
    env = compat.shape_env() if open_sizes else None
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=env)
    compat.refuse_data_pointers(mode)
    # Not a subclass: higher-order operators look up the modes that they support by class.
    mode.dispatch = functools.partial(_dispatch, mode, mode.dispatch)
    return mode


class OpenSizes(compat.SymbolicSizes):
    """The sizes of a microbatch's tensors by their places among the batch's leaves: ``shapes`` gives each dimension its
    size, or the place of an open one among ``hints``, and whether it is open."""

    def __init__(self, hints: Sequence[int], shapes: Mapping[int, Sequence[tuple[int, bool]]]):
        super().__init__(hints, fake_mode(open_sizes=True))
        self.shapes = {
            leaf: [self.symbols[size] if is_open else size for size, is_open in shape] for leaf, shape in shapes.items()
        }

    def fake(self, leaf: int, like: torch.Tensor) -> torch.Tensor:
        """The fake tensor that a leaf is traced with: contiguous, like ``like`` except for its sizes. If ``like`` is
        the first part of a larger tensor, so is the result."""
        shape = self.shapes[leaf]
        parts = like.untyped_storage().nbytes() // max(1, like.numel() * like.element_size()) if shape else 1
        whole = [parts * shape[0], *shape[1:]] if parts > 1 else shape
        with self.mode, torch.no_grad():
            made = torch.empty(whole, dtype=like.dtype, device=like.device)
            return made.narrow(0, 0, shape[0]) if parts > 1 else made


def _dispatch(
    mode: compat.FakeTensorMode, dispatch: Callable, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """The results of ``dispatch``, the first one in the memory layout that the real kernel gives."""
    if func is _GROUPED and all(t.fake_mode is mode for t in args[:2] if isinstance(t, compat.FakeTensor)):
        with mode:
            return _grouped_mm(*args, **(kwargs or {}))
    if mode.shape_env is not None and (formula := compat.for_open_sizes(func)) and compat.is_open(args[0]):
        with mode:
            return formula(*args, **(kwargs or {}))
    made = dispatch(func, types, args, kwargs)
    # torch says that its workspace is empty, which is true with gradient mode off.
    if func is aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
        with mode:
            size = recurrent.workspace_size(args[0], args[1:5], *args[5:])
            return *made[:3], made[0].new_empty(size, dtype=torch.uint8)
    if func in _VIEWS and 1 in made.shape and not compat.is_open(args[0]):
        return _viewed(mode, args[0], made)
    if not any(func in known for known in _KNOWN):
        return _pointwise(mode, [*args, *(kwargs or {}).values()], made) if _is_pointwise(func) else made
    first = made[0] if isinstance(made, tuple) else made
    on_cpu = func in _CONTIGUOUS_ON_CPU or func in _CHANNELS_LAST_OR_CONTIGUOUS_ON_CPU
    if first is None or (on_cpu and first.device.type != "cpu"):
        return made
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
    with mode:
        if func in _BY_ARGUMENTS:
            operands = (given[name] for name in _BY_ARGUMENTS[func])
            operands = torch.broadcast_tensors(*(x for x in operands if isinstance(x, Tensor)))
            strides = compat.compute_elementwise_output_strides(*operands)
        elif func in _CHANNELS_LAST_OR_CONTIGUOUS_ON_CPU:
            like = given[_CHANNELS_LAST_OR_CONTIGUOUS_ON_CPU[func]]
            strides = torch.empty_like(like, memory_format=compat.suggest_memory_format(like)).stride()
        else:
            like = torch.empty_like(given[_LIKE[func]]) if func in _LIKE else None
            strides = like.stride() if like is not None and like.shape == first.shape else None
        right = first.new_empty(first.shape) if strides is None else first.new_empty_strided(first.shape, strides)
    if right.stride() == first.stride():
        return made
    return (right, *made[1:]) if isinstance(made, tuple) else right


@functools.cache
def _is_pointwise(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or func in _COPIES:
        return False
    return func in _UNTAGGED or torch.Tag.pointwise in func.tags


def _pointwise(mode: compat.FakeTensorMode, args: Sequence[Any], made: Any) -> Any:
    """``made`` by a pointwise operator, in its real layout: torch's fake kernels compute half precision in fp32, and go
    by the layout of the copy that they make of an expanded argument."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    expanded = len(tensors) > 1 and any(t.dtype in _HALF and _is_expanded(t) for t in tensors)
    if not isinstance(made, Tensor) or not expanded:
        return made
    with mode:
        operands = torch.broadcast_tensors(*tensors)
        strides = compat.compute_elementwise_output_strides(*operands)
        wrong = operands[0].shape == made.shape and strides != made.stride()
        return made.new_empty_strided(made.shape, strides) if wrong else made


def _is_expanded(x: Tensor) -> bool:
    return any(type(stride) is int and stride == 0 for stride in x.stride())


def _viewed(mode: compat.FakeTensorMode, x: Tensor, made: Tensor) -> Tensor:
    """``made``, a view of ``x``, with the strides that its dimensions of size 1 really have; products go by them."""
    with compat.without_modes():
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(made.shape).stride()
    if strides == made.stride():
        return made
    with mode:
        return torch.as_strided(x, made.shape, strides, x.storage_offset())


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What ``torch._grouped_mm`` gives, without values.

    ``a`` (M, K) or (G, M, K), ``b`` (K, N) or (G, K, N), each bf16, fp16 or fp32; ``offs`` (G,), int32: where each
    group ends in the dimension that both or one of them lack. Rows are padded to 16 bytes, as the real kernel's.
    """
    problem = _grouped_mm_problem(a, b, offs, bias)
    if problem:
        raise RuntimeError(f"torch._grouped_mm: {problem}")
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim:  # the groups divide what is summed over, or are given
        shape = (offs.shape[0] if a.ndim == 2 else a.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    step = 16 // dtype.itemsize
    width = (columns + step - 1) // step * step
    return a.new_empty_strided(shape, (rows * width, width, 1)[-len(shape) :], dtype=dtype)


def _grouped_mm_problem(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None) -> str | None:
    """Why the real kernel refuses its arguments, or None."""
    if bias is not None:
        return "a bias is not supported"
    for name, t in (("a", a), ("b", b)):
        if t.dtype not in (torch.bfloat16, torch.float16, torch.float32) or t.ndim not in (2, 3):
            return f"{name} is {t.dtype} of {t.ndim} dimensions; allowed: bfloat16, float16 or float32 of 2 or 3"
        (rows, columns), (outer, inner) = t.shape[-2:], t.stride()[-2:]
        along = inner if outer == 1 and inner >= max(1, rows) else outer if inner == 1 and outer >= columns else None
        if along is None or along * t.element_size() % 16:
            return f"{name} has shape {list(t.shape)} and strides {t.stride()}; rows must lie 16 bytes apart, or 32, .."
    if (a.ndim, b.ndim) != (2, 2) and a.shape[-1] != b.shape[-2]:
        return f"the inner dimensions {a.shape[-1]} and {b.shape[-2]} differ"
    if (offs is None) != (a.ndim == b.ndim == 3):
        return "offs must be given, but for two arguments of 3 dimensions"
    if offs is not None and (offs.dtype != torch.int32 or offs.ndim != 1):
        return f"offs is {offs.dtype} of {offs.ndim} dimensions; it must be int32 of 1"
    return None

"""Eager calls with less overhead, for kernels of a few microseconds, and operators without a public name."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from stepgraph.compat.replaced import for_this_thread, replaced, replaced_functions


def below_autograd() -> contextlib.AbstractContextManager:
    """Operators called inside skip the autograd dispatch keys: no graph, and about a microsecond less each."""
    return torch._C._AutoDispatchBelowAutograd()


def empty_strided(device_type: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """The allocator of Inductor's generated code: (size, stride, dtype) on the current device of ``device_type``.

    It takes a quarter of the time of `torch.empty` and bypasses the dispatcher: for plain eager only.
    """
    return {"cpu": torch._C._dynamo.guards._empty_strided_cpu, "cuda": torch._C._dynamo.guards._empty_strided_cuda}[
        device_type
    ]


def cuda_device_and_stream() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Two functions: the index of the current CUDA device, and the raw current stream of a device.

    For processes in which CUDA is initialized, which `torch.cuda` would check at every call. Builds of torch without
    CUDA lack the private ones.
    """
    if not torch.backends.cuda.is_built():
        return torch.cuda.current_device, lambda index: torch.cuda.current_stream(index).cuda_stream
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


def in_function_transform() -> bool:
    """Whether a transform of ``torch.func`` (vmap, grad) is active; False under the compiler, which handles them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


_is_traced = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._are_functorch_transforms_active

#: Subclasses (DTensor, fake tensors) must go through the dispatcher.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def in_plain_eager(x: Tensor, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> bool:
    """Whether a call on tensors, ``x`` on a CPU or CUDA, may bypass the dispatcher: they are not subclasses, and no
    compiler, dispatch mode or function transform (vmap, grad) is active. Tracers other than Dynamo are dispatch modes.
    """
    return (
        not (_is_traced() or _dispatch_modes() or _function_transforms())
        and type(x) in _PLAIN
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and type(c) in _PLAIN
        and (x.is_cuda or x.is_cpu)
    )


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """``(a * scale_a) (b * scale_b)^T`` in bf16, of contiguous ``a`` (M, K) and ``b`` (N, K) in fp8 on a GPU, with fp32
    scales for each as a whole or for each of their rows. ``bias``: (N,) bf16 or None. ``fast``: sums stay in the
    tensor cores' accumulators."""
    if scale_a.ndim:
        scale_a, scale_b = scale_a.unsqueeze(1), scale_b.unsqueeze(0)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor) -> Tensor:
    """Products of groups in bf16, of ``a`` and ``b`` in float8_e4m3fn on a GPU, with a scale for each row of a group of
    ``a`` and column of a group of ``b``, fp32: (M, K) with (E, K, N), where ``offsets`` (E,) are ends of rows of ``a``;
    or (M, K) with (K, N), where they are ends of places that are summed over. Sums stay in the tensor cores'
    accumulators."""
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True)


def assert_all(holds: Tensor, message: str) -> None:
    """Raise ``RuntimeError`` with ``message`` unless all of ``holds`` is true: on a GPU when the device finds out."""
    torch._assert_async(holds.all(), message)


def outside_function_modes(frame: FrameType) -> FrameType:
    """``frame``, or the innermost one around it that is not of a ``TorchFunctionMode`` of torch's."""
    while frame.f_back is not None and frame.f_code.co_filename == torch.utils._device.__file__:
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def watch_autocast(refuse: Callable[[str], None]) -> Iterator[dict[str, torch.dtype]]:
    """The autocasts that are on, by type of device, which operators that are being dispatched cannot see. Inside, it
    follows ``torch.autocast``; none is on before.

    ``refuse`` is called with the name of a function that switches autocast on where no ``torch.autocast`` is open:
    casts of weights would stay in its cache, also for later steps."""
    casts: dict[str, torch.dtype] = {}
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_enabled(*given: Any) -> None:
        if given[-1] and not casts and sys._getframe(2).f_globals["__name__"] != torch.autocast.__module__:
            refuse("torch.set_autocast_enabled")
        enable(*given)
        kind, on = given if len(given) == 2 else ("cuda", *given)
        casts.pop(kind, None)
        if on:
            casts[kind] = torch.get_autocast_dtype(kind)

    def set_dtype(kind: str, dtype: torch.dtype) -> None:
        choose(kind, dtype)
        if kind in casts:
            casts[kind] = dtype

    set_enabled, set_dtype = for_this_thread(set_enabled, enable), for_this_thread(set_dtype, choose)
    with replaced_functions(torch, set_autocast_enabled=set_enabled, set_autocast_dtype=set_dtype):
        yield casts


def has_autocast_rule(target: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether autocast for ``device_type`` has a kernel for ``target``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), f"Autocast{device_type.upper()}")


def autocast_dtype(target: torch._ops.OpOverload, x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts ``x`` to before ``target``, an operator that it runs in fp32; None for none."""
    kind = x.device.type
    lower = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if lower and torch.is_autocast_enabled(kind) and has_autocast_rule(target, kind) else None


def open_around() -> tuple[Any, ...]:
    """What is open around a call and changes what operators do: ``TorchFunctionMode``s, without those of a default
    device, and the code of hooks of saved tensors, of which contexts make others each time they are entered."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) or ()
    hooks = tuple(getattr(hook, "__code__", hook) for hook in hooks)
    if not torch._C._len_torch_function_stack():
        return hooks
    modes = torch.overrides._get_current_function_mode_stack()
    return (*hooks, *(mode for mode in modes if not isinstance(mode, torch.utils._device.DeviceContext)))


def settings() -> dict[str, Any]:
    """Settings of torch for the whole process that a trace is specialized on."""
    precision = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.utils._device.CURRENT_DEVICE,
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.flash_sdp_enabled()": torch._C._get_flash_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": torch._C._get_mem_efficient_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": torch._C._get_math_sdp_enabled(),
        "torch.backends.cuda.cudnn_sdp_enabled()": torch._C._get_cudnn_sdp_enabled(),
        "torch.backends.cuda.matmul.fp32_precision": precision.replace("none", "ieee"),
        "torch.get_autocast_dtype('cpu')": torch.get_autocast_dtype("cpu"),
        "torch.get_autocast_dtype('cuda')": torch.get_autocast_dtype("cuda"),
        "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled(),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled(),
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled(),
        "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic(),
    }


#: Settings that operators read when they run. Not cuDNN's, which a context may set around an operator that is traced
#: by them, such as CTC's loss.
_READ_BY_OPERATORS = ("blas", "cpu", "cublas", "default_dtype", "deterministic", "float32", "fp32", "linalg", "mkldnn")
_READ_BY_OPERATORS += ("nnpack", "onednn")


def flushes_denormal() -> bool:
    """Whether this thread computes zero for numbers below the least normal one."""
    return sys.float_info.min / 2 == 0


@contextlib.contextmanager
def kept_settings(change: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``change(name)`` is called before this thread gives a setting that operators read when they run another
    value. Other threads may, as those do that load batches."""
    tracing = threading.get_ident()

    def checked(name: str, setter: Callable, read: Callable | None = None) -> Callable:
        def set_to(*given: Any, **options: Any) -> Any:
            getter = read or getattr(torch._C, f"_get_{name}", None) or getattr(torch, f"get_{name}", None)
            if name.startswith("fp32"):
                current = (*given[:-1], torch._C._get_fp32_precision_getter(*given[:-1]))
            else:
                current = getter()
            if given and current not in (given, given[0]) and threading.get_ident() == tracing:
                change(name.removesuffix("_setter").replace("_", " "))
            return setter(*given, **options)

        return set_to

    def assigned(prop: Any, module: Any, value: Any) -> None:
        if prop.getter() != value and threading.get_ident() == tracing:
            change(next(f"{module.__name__}.{name}" for name, one in vars(type(module)).items() if one is prop))
        prop.setter(value)

    names = [name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")]
    found = {f"_set_{name}": name for name in names if name.startswith(_READ_BY_OPERATORS)}
    in_torch = {
        "set_num_threads": checked("num_threads", torch.set_num_threads),
        "use_deterministic_algorithms": checked("deterministic_algorithms", torch.use_deterministic_algorithms),
        "set_flush_denormal": checked("flush_denormal", torch.set_flush_denormal, flushes_denormal),
    }
    with (
        replaced_functions(torch, **in_torch),
        replaced(torch._C, **{key: checked(name, getattr(torch._C, key)) for key, name in found.items()}),
        replaced(torch.backends.ContextProp, __set__=assigned),
    ):
        yield

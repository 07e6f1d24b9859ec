"""Fake tensors: shapes without values, and how torch and transformers treat them."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor as fake_tensors
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from stepgraph.compat.eager import assert_all
from stepgraph.compat.replaced import for_this_thread, replaced, replaced_functions

#: What fake tensors raise where a value, not only a shape, would be needed.
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

_MESSAGES = {
    ".numpy()": ".numpy() is not supported",
    ".data_ptr()": "Cannot access data pointer",
    "a function that reads memory itself": "its data is not allocated yet",
    "formatting or printing a tensor": "passed to FakeTensor.__",
    "pickle or copy.deepcopy of a tensor": "FakeTensor has no copy",
    "torch.Size() of tensors": " is 'FakeTensor')",
}


def operator_needing_values(error: Exception) -> str | None:
    """Name of the operator that failed because fake tensors have no values; None if ``error`` is something else."""
    if isinstance(error, _DATA_DEPENDENT):
        return str(getattr(error, "func", "a data-dependent operator"))
    for name, message in _MESSAGES.items():
        if isinstance(error, RuntimeError | TypeError) and message in str(error):
            return name
    return None


def is_answered(error: Exception) -> bool:
    """Whether `answer` was called for ``error``."""
    return "_answered" in vars(error)


def answer(error: Exception) -> None:
    """Note that who caught ``error`` does without the value."""
    vars(error)["_answered"] = True


def failed_reads(
    note: Callable[[Exception], None], counts: Callable[[str], bool]
) -> contextlib.AbstractContextManager[None]:
    """Inside, ``note`` receives the error of each read of a fake tensor's values or memory that calls no operator.
    ``counts``: by its file, whether code may not print it."""

    def noting(read: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return read(*args, **kwargs)
            except (RuntimeError, TypeError) as error:
                note(error)
                raise

        return call

    def uncopied(*_: Any) -> Any:
        raise TypeError("FakeTensor has no copy")

    def shown(name: str) -> Callable:
        show = getattr(FakeTensor, name)

        def call(tensor: FakeTensor, *args: Any, **kwargs: Any) -> str:
            if name == "__format__" and not tensor.ndim:
                return format(tensor.item(), *args)
            if counts(sys._getframe(2).f_code.co_filename):  # str() and print() have no frames
                raise TypeError(f"a tensor without values was passed to FakeTensor.{name}")
            return show(tensor, *args, **kwargs)

        return noting(call)

    reads = {name: noting(getattr(FakeTensor, name)) for name in ("numpy", "data_ptr")}
    reads |= {name: noting(uncopied) for name in ("__deepcopy__", "__reduce_ex__")}
    reads |= {name: shown(name) for name in ("__format__", "__repr__")}
    return replaced(FakeTensor, **reads)


def shown_tensors(note: Callable[[torch.Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, ``note`` receives each tensor with values that this thread prints or formats."""
    show = torch._tensor_str._str

    def noting(tensor: torch.Tensor, **options: Any) -> str:
        if is_fake(tensor):
            return show(tensor, **options)
        note(tensor)
        with _disable_current_modes():
            return show(tensor, **options)

    return replaced(torch._tensor_str, _str=for_this_thread(noting, show))


def literal_of(tensor: FakeTensor) -> torch.Tensor | None:
    """The values of a fake tensor that is a literal, ``torch.tensor(2.0)``; None for others."""
    return tensor.constant


def class_in_eager(tensor: FakeTensor) -> type[torch.Tensor]:
    """The class of the tensor that a fake one represents."""
    held = _HELD.__get__(tensor)
    return held.get(_CLASS) or (nn.Parameter if held.get("_is_param") else torch.Tensor)


_HELD = vars(torch.Tensor)["__dict__"]

#: What Python may ask a tensor besides its shape and values; a fake tensor answers from the trace.
_FACTS = ("_version", "_base", "grad", "__dict__")
_FACTS_CALLED = ("_is_view", "is_set_to", "is_shared", "storage_offset", "__dir__")
#: Attributes that fake tensors alone have.
_OF_FAKE = ("constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor")
_CLASS = " class"
_OF_USER = " of the user"  # where the user's attributes of these names are


def represent(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give ``tensor``, which represents ``other`` in a trace, its class and those of its attributes that it lacks."""
    held = vars(tensor)
    for name, value in vars(other).items():
        held.setdefault(name + _OF_USER if name in _OF_FAKE and isinstance(tensor, FakeTensor) else name, value)
    if isinstance(tensor, FakeTensor) and not isinstance(other, FakeTensor):
        held[_CLASS] = type(other)
        if isinstance(other, nn.Parameter):
            held["_is_param"] = True  # isinstance(tensor, nn.Parameter)


@functools.cache
def _names_in_fake() -> frozenset[str]:
    with without_modes():
        return frozenset((*vars(FakeTensorMode().from_tensor(torch.empty(0))), _CLASS, "_is_param"))


def attributes_set(tensor: torch.Tensor, other: torch.Tensor) -> list[str]:
    """The attributes of ``tensor``, which represents ``other`` in a trace, that the trace has set to something else."""
    if not isinstance(tensor, FakeTensor) or isinstance(other, FakeTensor):
        return []
    held = {name.removesuffix(_OF_USER): v for name, v in vars(tensor).items() if name not in _names_in_fake()}
    missing = object()
    before = {name: vars(other).get(name, missing) for name in held if not name.startswith("_dynamo")}
    return [name for name, old in before.items() if held[name] is not old and repr(held[name]) != repr(old)]


@contextlib.contextmanager
def facts_of_fake_tensors(
    ask: Callable[[Any, str, str], None], counts: Callable[[str], bool], is_under_torch: Callable[[str], bool]
) -> Iterator[None]:
    """Inside, ``ask(tensor, name, file)`` is called before code in ``file`` reads a fake tensor's version, view, place
    in its memory, gradient, attributes, or its memory's device or size, and before it assigns ``.grad`` or ``.data``
    (``name`` then ends in " ="). Code in files that ``counts`` finds no attributes that fake tensors alone have; code
    in files that are not ``is_under_torch`` finds eager's ``__class__``."""

    def asked(name: str) -> property:
        found = _HELD if name == "__dict__" else getattr(torch.Tensor, name)

        def read(tensor: FakeTensor) -> Any:
            ask(tensor, name, sys._getframe(1).f_code.co_filename)
            return found.__get__(tensor)

        def write(tensor: FakeTensor, value: Any) -> None:
            ask(tensor, f"{name} =", sys._getframe(1).f_code.co_filename)
            found.__set__(tensor, value)

        return property(found.__get__ if name == "data" else read, write)

    def called(name: str) -> Callable:
        found = getattr(torch.Tensor, name)

        def call(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            ask(tensor, name, sys._getframe(1).f_code.co_filename)
            return found(tensor, *args, **kwargs)

        return call

    def hidden(name: str) -> property:
        def read(tensor: FakeTensor) -> Any:
            held, of_user = _HELD.__get__(tensor), counts(sys._getframe(1).f_code.co_filename)
            if of_user and name + _OF_USER not in held:
                raise AttributeError(f"'{class_in_eager(tensor).__name__}' object has no attribute '{name}'")
            return held[name + _OF_USER * of_user]

        def write(tensor: FakeTensor, value: Any) -> None:
            _HELD.__get__(tensor)[name + _OF_USER * counts(sys._getframe(1).f_code.co_filename)] = value

        return property(read, write)

    def class_of(tensor: FakeTensor) -> type:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "__instancecheck__":  # torch's, of a class of parameters
            frame = frame.f_back or frame
        return FakeTensor if is_under_torch(frame.f_code.co_filename) else class_in_eager(tensor)

    def of_storage(name: str) -> Callable[[torch.UntypedStorage], Any]:
        plain = getattr(torch.UntypedStorage, name)

        def read(storage: torch.UntypedStorage) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename == torch.storage.__file__:
                frame = frame.f_back
            if device.__get__(storage).type == "meta":
                ask(storage, f"storage().{name}", frame.f_code.co_filename)
            return plain.__get__(storage) if name == "device" else plain(storage)

        return read

    device = torch.UntypedStorage.device
    facts = {name: asked(name) for name in (*_FACTS, "data")} | {name: called(name) for name in _FACTS_CALLED}
    facts |= {name: hidden(name) for name in _OF_FAKE} | {"__class__": property(class_of)}
    bases = FakeTensor.__bases__
    FakeTensor.__bases__ = (type(torch.Tensor)("Tensor", bases, facts),)  # a class's own __class__ cannot be set
    try:
        sizes = {name: of_storage(name) for name in ("nbytes", "size")}
        with replaced(torch.UntypedStorage, device=property(of_storage("device")), **sizes):
            yield
    finally:
        FakeTensor.__bases__ = bases


def refuse_data_pointers(mode: FakeTensorMode) -> None:
    """Let ``.data_ptr()`` of the mode's tensors fail. By default it gives 0, which a kernel would write to."""
    mode._allow_unsafe_data_ptr_access = False


def without_modes() -> contextlib.AbstractContextManager:
    """Operators called inside are neither traced nor faked."""
    return _disable_current_modes()


def transformers_sees_values(known: Callable[[torch.Tensor], bool]) -> contextlib.AbstractContextManager[None]:
    """Inside, Hugging Face transformers, if loaded, looks at the values of fake tensors whose values are ``known``.

    By default it looks at none of a fake tensor's: attention then gets a mask that says no more than "causal", and keys
    repeated for every query head.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if is_fake_tensor is None:
        return contextlib.nullcontext()
    return replaced(module, is_fake_tensor=lambda x: is_fake_tensor(x) and not known(x))


def checks_of_known_values(known: Callable[[torch.Tensor], bool]) -> contextlib.AbstractContextManager[None]:
    """Inside, torch's checks that all elements of a tensor are true look at tensors whose values are ``known``; for
    others, a step that runs raises the error. transformers checks so that a batch holds as many image tokens as image
    features."""
    check = torch._check_tensor_all_with

    def check_known(error_type: type[Exception], cond: torch.Tensor, message: Any = None) -> None:
        if known(cond):
            check(error_type, cond, message)
        else:
            assert_all(cond, str(message() if callable(message) else message or "Expected all elements to be true"))

    return replaced(torch, _check_tensor_all_with=for_this_thread(check_known, check))


def truth(tensor: torch.Tensor) -> bool:
    """``bool(tensor)``, which asks a fake number only whether it is zero: what else it is does not decide."""
    return bool(
        tensor != 0 if isinstance(tensor, FakeTensor) and tensor.dtype != torch.bool and tensor.numel() == 1 else tensor
    )


@contextlib.contextmanager
def lists_of_fake_tensors(listed: Callable[[torch.Tensor], list | None]) -> Iterator[None]:
    """Inside, ``torch.tensor([a, b])``, ``torch.Tensor([a, b])`` and the like of tensors, whose memory torch would
    read, call their ``.item()``; ``.tolist()``, which calls it for each element, asks ``listed`` for all at once,
    unless that gives None; so do ``x.tensor_split(t)`` and ``.numpy()``, whose array cannot be written."""
    make, to_list, to_array = torch.tensor, FakeTensor.tolist, FakeTensor.numpy

    def tolist(tensor: FakeTensor) -> Any:
        found = listed(tensor)
        return to_list(tensor) if found is None else found

    def numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
        if (tensor.device.type != "cpu" and not force) or (found := listed(tensor)) is None:
            return to_array(tensor, force=force)
        with without_modes():
            array = make(found, dtype=tensor.dtype).reshape(tensor.shape).numpy()
        array.flags.writeable = False
        return array

    with (
        replaced(torch.Tensor, tensor_split=_split_by_numbers, **_NUMBERS),
        replaced_functions(torch, tensor_split=_split_by_numbers),
        replaced(FakeTensor, tolist=tolist, numpy=numpy),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")  # torch.as_tensor of such an array
        yield


def _seen_by_modes(name: str) -> Callable:
    """The method that converts a tensor to a number of Python; constructors of tensors call it below all modes."""
    convert, keys = getattr(torch.Tensor, name), torch._C.DispatchKey

    def call(tensor: torch.Tensor) -> Any:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        if not excluded.has(keys.Python):
            return convert(tensor)
        excluded = excluded.remove(keys.Python).remove(keys.PythonTLSSnapshot)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return convert(tensor)

    return call


#: The same ones for all traces, nested ones too: a trace that watches ``torch.Tensor`` would notice another one.
_NUMBERS = {name: _seen_by_modes(name) for name in ("__float__", "__index__", "__complex__")}
_split = torch.tensor_split


def _split_by_numbers(
    input: torch.Tensor, tensor_indices_or_sections: Any = None, *dim: int, **options: Any
) -> tuple[torch.Tensor, ...]:
    by = tensor_indices_or_sections
    given = () if by is None else (by.tolist() if isinstance(by, torch.Tensor) else by, *dim)
    return _split(input, *given, **options)


def fake_of(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """``FakeTensor(mode, meta, device)`` in a third of the time: what the class sets of a new tensor is the same for
    all of a device. ``meta``: without gradient."""
    patterns = vars(mode).setdefault(_PATTERNS, {})
    if (found := patterns.get(device)) is None:
        pattern = FakeTensor(mode, torch.empty(0, device="meta"), device)
        found = patterns[device] = pattern.fake_device, dict(_HELD.__get__(pattern))
    made = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=found[0])
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    _HELD.__get__(made).update(found[1])
    return made


#: Where a mode has, by device, what new tensors of it hold.
_PATTERNS = "_stepgraph_patterns"


def fake_storage(size: int) -> torch.UntypedStorage:
    """Storage of ``size`` bytes for `fake_tensor`."""
    return torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()


def fake_tensor(
    mode: FakeTensorMode,
    device: torch.device,
    dtype: torch.dtype,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> FakeTensor:
    """A fake tensor over a `fake_storage`; call it outside all modes. The fake mode's own operators take fifty times as
    long, seconds for the graphs of a model."""
    return fake_of(mode, torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides), device)


@contextlib.contextmanager
def gpu_context_once() -> Iterator[None]:
    """Inside, torch asks once for each GPU whether it is there, and allocates on it, not for every fake tensor."""
    ask = vars(fake_tensors).get("init_gpu_context")  # torch itself remembers since 2.13
    with replaced(fake_tensors, init_gpu_context=functools.cache(ask)) if ask else contextlib.nullcontext():
        yield


def empty_fake(
    mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A fake tensor in memory of its own, as `fake_tensor` makes them."""
    return fake_of(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``; of a fake tensor in a tenth of the time."""
    return fast_detach(tensor.fake_mode, tensor) if isinstance(tensor, FakeTensor) else tensor.detach()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two live tensors, real or fake, exactly if they share storage."""
    return tensor.untyped_storage()._cdata


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with every sign turned as it is read, in the same storage."""
    return torch._neg_view(tensor)


def _fused_adamw_on_meta(*args: Any, **kwargs: Any) -> None:
    """Shapes of the fused AdamW update: it only writes in place."""


# torch registers a meta kernel only for the overload whose learning rate is a number. For the one with a tensor, fake
# tensors would otherwise run the real kernel on zeros of the model's size.
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_.tensor_lr", "Meta"):
    _LIBRARY.impl("_fused_adamw_.tensor_lr", _fused_adamw_on_meta)

"""What a capture reads of Python objects, as text that is equal in two processes if the objects are.

An object is described by its class and all that it holds, in full. What cannot be, such as a file, a generator or an
extension's own object, raises `Indescribable`: a step that may read it is captured anew.
"""

import contextvars
import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import re
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepgraph import compat

_PLAIN = (int, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Elements of the largest tensor beside parameters and buffers whose values are compared.
_LARGEST = 1 << 20
_LIBRARY = ("torch", "stepgraph", "builtins", "typing", "collections", "functools", "enum")
#: No part of what an object holds; transformers notes the hash of a generation's options, another in each process.
_NOT_HELD = ("__weakref__", "_original_object_hash")
#: Hold nothing that a trace reads.
_SILENT = (logging.Logger, torch.library.Library)


class Indescribable(ValueError):
    """An object that no text stands for; the message says which."""


class Describer:
    """Describes objects. Within one call a module, a parameter and whatever was met before are named, not repeated."""

    def __init__(self, names: Mapping[int, str] | None = None):
        self.names = dict(names or {})  # of modules, parameters and buffers, by id
        self._met: dict[int, str] = {}
        self._classes: dict[type, str] = {}
        self._kept: list[Any] = []

    def __call__(self, value: Any, where: str) -> str:
        """The text of ``value``, found at ``where``."""
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return repr(value)
        if isinstance(value, float):
            return float.hex(value)
        if id(value) in self.names:
            return self.names[id(value)]
        if id(value) in self._met:
            return self._met[id(value)]
        self._met[id(value)] = f"<{len(self._met)}>"
        self._kept.append(value)
        return self._described(value, where)

    def _described(self, value: Any, where: str) -> str:
        match value:
            case enum.Enum():
                return f"{_name(type(value))}.{value.name}"
            case list() | tuple() if type(value).__module__ == "builtins" or isinstance(value, tuple):
                return self._several(value, where, type(value).__qualname__)
            case set() | frozenset():
                return f"set{sorted(self(item, where) for item in value)}"
            case range() | slice():
                return repr(value)
            case torch.Tensor():
                return self._tensor(value, where)
            case types.ModuleType():
                return f"module {value.__name__}"
            case types.FunctionType():
                return self._function(value, where)
            case types.MethodType():
                return f"method {self(value.__func__, where)} of {self(value.__self__, where)}"
            case functools.partial():
                return f"partial({self((value.func, value.args, value.keywords), where)})"
            case type():
                return f"class {_name(value)} {self._of_class(value, where)}"
            case types.BuiltinFunctionType() | torch._ops.OpOverload() | torch._ops.HigherOrderOperator():
                return (
                    f"{type(value).__name__} {getattr(value, '__module__', '')} {value}"
                    if not isinstance(value, types.BuiltinFunctionType)
                    else f"built in {value.__module__}.{value.__qualname__}"
                )
            case re.Pattern():
                return f"pattern {value.pattern!r} {value.flags}"
            case contextvars.ContextVar():
                return f"variable {value.name} {self(value.get(None), where)}"
            case dist.DeviceMesh():
                return f"mesh {value.mesh.shape} {value.mesh_dim_names}"
            case dist.ProcessGroup():
                return f"group {value.group_desc} of {value.size()}"
        if isinstance(value, _SILENT):
            return type(value).__name__
        return self._object(value, where)

    def _several(self, items: Any, where: str, kind: str) -> str:
        return f"{kind}({', '.join(self(item, f'{where}[{i}]') for i, item in enumerate(items))})"

    def _tensor(self, value: torch.Tensor, where: str) -> str:
        if compat.is_fake(value) or value.device.type == "meta" or compat.is_traceable_wrapper_subclass(value):
            return form_of(value)
        if value.numel() > _LARGEST or value.layout is not torch.strided:
            raise Indescribable(f"{where}, a tensor of {value.numel():,} elements that is no parameter and no buffer")
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{form_of(value)} {hashlib.sha256(data).hexdigest()}"

    def _function(self, value: types.FunctionType, where: str) -> str:
        name = f"function {value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
        if of_library(value.__module__) and not value.__closure__:
            return name
        cells = [_content(cell) for cell in value.__closure__ or ()]
        held = (cells, value.__defaults__, value.__kwdefaults__)
        return f"{name} {self(held, f'{where} ({value.__qualname__})')}"

    def _of_class(self, cls: type, where: str) -> str:
        """The plain values and the methods that user's classes hold: a library may have put others in their place."""
        if cls not in self._classes:
            found = {}
            for base in reversed(cls.__mro__):
                if not of_library(base.__module__):
                    found |= {k: v for k, v in vars(base).items() if isinstance(v, (*_PLAIN, float)) and k[:2] != "__"}
                    found |= {k: code for k, v in vars(base).items() if (code := _code_of(v))}
            self._classes[cls] = str({key: self(value, f"{where}.{key}") for key, value in sorted(found.items())})
        return self._classes[cls]

    def _object(self, value: Any, where: str) -> str:
        """Any other object: its class and what it holds."""
        kind = type(value)
        if isinstance(value, Mapping):
            inside = [f"{self(key, where)}: {self(item, f'{where}[{key!r}]')}" for key, item in value.items()]
            return f"{_name(kind)} {{{', '.join(inside)}}} {self._held(value, where)}"
        if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
            return f"{_name(kind)} {self._of_class(kind, where)} {self._held(value, where)}"
        if inspect.isclass(kind) and hasattr(kind, "__slots__"):
            slots = {
                name: getattr(value, name, None) for base in kind.__mro__ for name in getattr(base, "__slots__", ())
            }
            return f"{_name(kind)} {self(slots, where)}"
        raise Indescribable(f"{where}, a {_name(kind)}")

    def _held(self, value: Any, where: str) -> str:
        held = {key: v for key, v in getattr(value, "__dict__", {}).items() if not _is_left_out(type(value), key)}
        return str({key: self(item, f"{where}.{key}") for key, item in sorted(held.items())})


def of_library(module: str | None) -> bool:
    """Whether a module is one whose code the versions in a key stand for."""
    return (module or "").partition(".")[0] in _LIBRARY


def _is_left_out(cls: type, name: str) -> bool:
    """Whether what an object holds under ``name`` is no part of it: what our own classes or torch's compute of the rest
    and keep, for whoever asked first."""
    cached = isinstance(getattr(cls, name, None), functools.cached_property)
    return name in _NOT_HELD or (cached and of_library(cls.__module__))


def _code_of(value: Any) -> str | None:
    """Of a method, property and the like: which functions they are."""
    held = (getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))
    functions = [f for f in (value, *held) if isinstance(f, types.FunctionType)]
    return " ".join(f"{f.__module__}.{f.__qualname__} {code_digest(f.__code__)}" for f in functions) or None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def code_digest(code: types.CodeType) -> str:
    """A hash of what a function does, without where it is written."""
    text = repr((code.co_code, _constant(code.co_consts), code.co_names, code.co_varnames, code.co_freevars))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> Any:
    """A constant of a function as text; a set, as of ``x in {"a", "b"}``, has another order in every process."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, (tuple, frozenset)):
        items = [str(_constant(item)) for item in value]
        return f"set{sorted(items)}" if isinstance(value, frozenset) else items
    return repr(value)


def form_of(tensor: torch.Tensor) -> str:
    """Of a tensor what a trace sees: all but its values."""
    inner = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    placements = f" {tensor.placements} {tuple(tensor.shape)}" if hasattr(tensor, "placements") else ""
    device = "cuda" if inner.is_cuda else inner.device
    form = f"{inner.dtype} {tuple(inner.shape)} {inner.stride()} {device}{placements}"
    return f"{type(tensor).__name__} {form}{' trained' * tensor.requires_grad}{'' if tensor.is_leaf else ' made'}"


def _place(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(storage, offset) of a tensor that has memory of its own or shares another's."""
    inner = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if compat.is_traceable_wrapper_subclass(inner) or inner.is_meta or inner.layout is not torch.strided:
        return None
    return compat.storage_key(inner), inner.storage_offset()


#: What of a module is described apart, or is torch's own.
_APART = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}


def describe_hooks(model: nn.Module) -> str:
    """The hooks that run with every module of the process."""
    names = {id(module): f"module {path or 'model'}" for path, module in model.named_modules()}
    hooks = [list(found.values()) for found in compat.hooks_of_every_module()]
    return Describer(names)(hooks, "a hook of every module")


def describe_model(model: nn.Module) -> dict[str, str]:
    """``path.name`` -> text, for every module, parameter, buffer and attribute of ``model``."""
    names: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        names.setdefault(id(module), f"module {path or 'model'}")
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                names.setdefault(id(tensor), f"tensor {path}.{key}")
    describe, found, storages = Describer(names), {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        at = path or "model"
        if names[id(module)] != f"module {at}":
            found[at] = names[id(module)]
            continue
        kind = type(module)
        found[at] = f"{_name(kind)} {describe._of_class(kind, at)}{' training' * module.training}"
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            where = f"tensor {path}.{key}"
            same = tensor is None or names[id(tensor)] == where
            found[f"{at}.{key}"] = names[id(tensor)] if not same else "None" if tensor is None else form_of(tensor)
            if tensor is not None and same and (place := _place(tensor)):
                first = storages.setdefault(place[0], where)
                found[f"{at}.{key}"] += f" in {first} at {place[1]}" if first != where else ""
        found[f"{at} holds"] = str(list(module._modules))
        for key, value in vars(module).items():
            if key not in _APART:
                if "hooks" in key and isinstance(value, dict):
                    value = list(value.values())  # the keys count hooks of the whole process
                found[f"{at}.{key}"] = describe(value, f"{at}.{key}")
    return {
        key: text if len(text) < 80 else f"#{hashlib.sha256(text.encode()).hexdigest()}" for key, text in found.items()
    }

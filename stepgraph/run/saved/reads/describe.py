"""What a capture reads of Python objects, as text that is equal in two processes if the objects are.

An object is described by its class and all that it holds, in full. What cannot be, such as a file, a generator or an
extension's own object, raises `Indescribable`: a step that may read it is captured anew.
"""

import collections
import contextlib
import contextvars
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import logging
import operator
import pathlib
import random
import re
import sys
import threading
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.run.saved.reads.code import all_inside, code_digest, globals_read
from stepgraph.run.saved.reads.layout import base_in_c, slots_of
from stepgraph.run.saved.reads.places import counted_module, file_digest, is_imported, of_library

#: Their own text; not what inherits from them.
_PLAIN = (int, bool, str, bytes, complex, type(None), type(...), type(NotImplemented))
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Elements of the largest tensor beside parameters and buffers whose values are compared.
_LARGEST = 1 << 20
#: No part of what an object holds; transformers notes the hash of a generation's options, another in each process.
_NOT_HELD = ("__weakref__", "__dict__", "_original_object_hash")
#: Hold nothing that a trace reads.
_SILENT = (logging.Logger, torch.library.Library, type(threading.Lock()), type(threading.RLock()), typing.TypeVar)
#: Attributes that C code computes of what an object holds.
_COMPUTED = (types.GetSetDescriptorType, types.MemberDescriptorType, type(collections.namedtuple("_", "a").a))
_CACHED = type(functools.lru_cache(len))
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
#: Classes in C that say in full what they hold when they are pickled.
_REDUCED = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, bytearray, np.dtype)
_REDUCED += (operator.itemgetter, operator.attrgetter, operator.methodcaller)
#: Classes in C that hold no more than their ``__dict__``.
_BARE = (object, types.SimpleNamespace, threading.local)


class Indescribable(ValueError):
    """An object that no text stands for; the message says which."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """What no text stands for, under the ``name`` of an attribute; ``reason``: as `Indescribable` has it."""

    name: str
    reason: str


class Describer:
    """Describes objects. Within one call a module, a parameter and whatever was met before are named, not repeated.

    ``open``: modules of Python, functions with a cache and what is `Unknown` that were met. The text has no more than
    their names: what a program reads of them is known when it has run.
    """

    def __init__(self, names: Mapping[int, str] | None = None, open: dict[Any, Any] | None = None):
        self.names = dict(names or {})  # of modules, parameters and buffers, by id
        self.open = {} if open is None else open
        self._met: dict[int, str] = {}
        self._kept: list[Any] = []

    def __call__(self, value: Any, where: str) -> str:
        """The text of ``value``, found at ``where``."""
        if type(value) in _PLAIN:
            return repr(value)
        if type(value) is float:
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
            case types.GenericAlias() | types.UnionType():  # before classes, as which list[int] passes
                return f"{type(value).__name__} {self((getattr(value, '__origin__', None), value.__args__), where)}"
            case range() | slice():
                return repr(value)
            case torch.Tensor():
                return self._tensor(value, where)
            case types.ModuleType():
                self.open[id(value)] = value
                return f"module {value.__name__}"
            case types.FunctionType():
                return self._function(value, where)
            case types.MethodType():
                return f"method {self(value.__func__, where)} of {self(value.__self__, where)}"
            case functools.partial():
                return f"partial({self((value.func, value.args, value.keywords), where)})"
            case type():
                return f"class {_name(value)} {self.of_class(value, where)}"
            case property():
                return f"property {self((value.fget, value.fset), where)}"
            case staticmethod() | classmethod():
                return f"{type(value).__name__} {self(value.__func__, where)}"
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                owner = getattr(value, "__self__", None)
                module = file_digest(getattr(owner, "__file__", "")) if counted_module(owner) else ""
                of = module if isinstance(owner, types.ModuleType) else f" of {self(owner, where)}"
                return f"built in {getattr(value, '__module__', None)}.{value.__qualname__}{of}"
            case torch._ops.OpOverload() | torch._ops.HigherOrderOperator():
                return f"{type(value).__name__} {getattr(value, '__module__', '')} {value}"
            case re.Pattern():
                return f"pattern {value.pattern!r} {value.flags}"
            case pathlib.PurePath():  # which keeps its hash, another in every process
                return f"{_name(type(value))} {value} {self(getattr(value, '__dict__', None), where)}"
            case contextvars.ContextVar():
                return f"variable {value.name} {self(value.get(None), where)}"
            case dist.DeviceMesh():
                return f"mesh {value.mesh.shape} {value.mesh_dim_names}"
            case dist.ProcessGroup():
                return f"group {value.group_desc} of {value.size()}"
        if isinstance(value, _SILENT):
            return type(value).__name__
        if isinstance(value, _COMPUTED + _OF_C):
            return f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
        return self._object(value, where)

    def _tensor(self, value: torch.Tensor, where: str) -> str:
        if compat.is_fake(value) or value.device.type == "meta" or compat.is_traceable_wrapper_subclass(value):
            return form_of(value)
        if value.numel() > _LARGEST or value.layout is not torch.strided:
            raise Indescribable(f"{where}, a tensor of {value.numel():,} elements that is no parameter and no buffer")
        data = (
            value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
        return f"{form_of(value)} {hashlib.sha256(data).hexdigest()}"

    def _function(self, value: types.FunctionType, where: str) -> str:
        """Its code and what it holds. Of globals only those that no module has, as of code that ``exec`` ran; others
        are compared when it has run."""
        name = f"function {value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
        if of_library(value.__globals__.get("__name__")) and not value.__closure__:
            return name
        cells = [_content(cell) for cell in value.__closure__ or ()]
        own = {key: v for key, v in vars(value).items() if not key.startswith(("__", "_torchdynamo"))}
        held = (cells, value.__defaults__, value.__kwdefaults__, own)
        if not is_imported(value.__globals__):
            names = dict.fromkeys(name for code in all_inside(value.__code__) for name in globals_read(code))
            held += ({n: value.__globals__[n] for n in names if n in value.__globals__},)
        return f"{name} {self(held, f'{where} ({value.__qualname__})')}"

    def of_class(self, cls: type, where: str) -> str:
        """What user's classes hold, once: a program may have put other values and methods in the place of theirs. What
        no text stands for may be there, as methods that no training step calls are: it is ``open``."""
        if self._met.get(id(cls), "").startswith("class"):
            return ""
        self._met[id(cls)] = f"class {_name(cls)}"
        self._kept.append(cls)
        found: dict[str, Any] = {}
        for base in reversed((*type(cls).__mro__, *cls.__mro__)):
            if not of_library(base.__module__):
                found |= {key: value for key, value in vars(base).items() if _is_of_class(key, value)}
        for key, value in sorted(found.items()):
            try:
                found[key] = self(value, f"{where}.{key}")
            except Indescribable as reason:
                if _is_sunder(key) or _is_called_by_library(cls, key):  # by code whose names are not looked at
                    raise
                found[key] = "unknown"
                self.open[id(cls), key] = Unknown(key, str(reason))
        return str(dict(sorted(found.items()))) if found else ""

    def _object(self, value: Any, where: str) -> str:
        """Any other object: its class, what a class in C that it inherits from holds, and its own attributes."""
        kind = type(value)
        inside = self._inherited(value, where)
        if kind.__module__ == "builtins":
            return f"{kind.__name__}{inside}"
        held = dict(sorted({**slots_of(value), **getattr(value, "__dict__", {})}.items()))
        own = {key: v for key, v in held.items() if not _is_left_out(kind, key)}
        if isinstance(value, enum.Enum):
            own = {key: v for key, v in own.items() if key == "_value_" or not _is_sunder(key)}
        text = {key: self(item, f"{where}.{key}") for key, item in own.items()}
        return f"{_name(kind)} {self.of_class(kind, where)} {inside} {text}"

    def _inherited(self, value: Any, where: str) -> str:
        """What ``value`` holds by a class in C. Raises `Indescribable` for one that is not known."""
        base = base_in_c(type(value))
        match value:
            case enum.Enum():
                return value.name
            case str() | int() | bytes() | complex():
                return base.__repr__(value)
            case np.generic() | np.ndarray() if not value.dtype.hasobject and value.nbytes <= _LARGEST:
                return f"{value.dtype.descr} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
            case float():
                return float.hex(value)
            case set() | frozenset():
                # Each as if it were the first: their order is another in every process.
                return f"set{sorted(copy.copy(self)._alone(item, where) for item in value)}"
            case list() | tuple() | collections.deque():
                return self._several(value, where)
            case collections.defaultdict():
                return f"{self(value.default_factory, where)} {self._mapping(value, where)}"
            case Mapping() if base is object or issubclass(base, dict | types.MappingProxyType):
                return self._mapping(value, where)
            case BaseException():
                return self(value.args, where)
            case random.Random():
                return self(value.getstate(), where)
            case torch.finfo() | torch.iinfo():
                return repr(value)
        if isinstance(value, _REDUCED):
            return self(value.__reduce_ex__(4), where)
        if isinstance(value, _CACHED):
            self.open[id(value)] = value
            return f"cached {self(value.__wrapped__, where)}"
        if base in _BARE or _is_under_its_name(value):
            return getattr(value, "__qualname__", "")
        raise Indescribable(f"{where}, a {_name(type(value))}")

    def _several(self, items: Iterable[Any], where: str) -> str:
        return f"({', '.join(self(item, f'{where}[{i}]') for i, item in enumerate(items))})"

    def _mapping(self, items: Mapping[Any, Any], where: str) -> str:
        inside = [f"{self(key, where)}: {self(item, f'{where}[{key!r}]')}" for key, item in items.items()]
        return f"{{{', '.join(inside)}}}"

    def _alone(self, value: Any, where: str) -> str:
        if type(value) not in _PLAIN:
            self._met, self._kept = dict(self._met), list(self._kept)
        return self(value, where)


def _is_of_class(name: str, value: Any) -> bool:
    """Whether what a class has under ``name`` is the user's, and not what Python notes of the class."""
    return isinstance(value, types.FunctionType | property) or not (_is_sunder(name) or name == "_abc_impl")


def _is_called_by_library(cls: type, name: str) -> bool:
    """Whether a class that a library has, as ``nn.Module``, knows what ``cls`` has under ``name``."""
    return any(of_library(base.__module__) and hasattr(base, name) for base in cls.__mro__)


def _is_sunder(name: str) -> bool:
    return name.startswith("_") and name.endswith("_")


def _is_left_out(cls: type, name: str) -> bool:
    """Whether what an object holds under ``name`` is no part of it: what our own classes or torch's compute of the rest
    and keep, for whoever asked first."""
    cached = isinstance(getattr(cls, name, None), functools.cached_property)
    again = name == "gen" and issubclass(
        cls, contextlib.ContextDecorator
    )  # made anew by each call of what it decorates
    return name in _NOT_HELD or again or (cached and of_library(cls.__module__))


def _is_under_its_name(value: Any) -> bool:
    """Whether ``value`` is a library's own, whose version says what it is, as NumPy's functions are."""
    module, name = getattr(value, "__module__", None) or "numpy", getattr(value, "__name__", None)
    found = sys.modules.get(module)
    return isinstance(name, str) and getattr(found, name, None) is value and of_library(module)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def form_of(tensor: torch.Tensor) -> str:
    """Of a tensor what a trace sees: all but its values."""
    inner = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    placements = f" {tensor.placements} {tuple(tensor.shape)}" if hasattr(tensor, "placements") else ""
    device = "cuda" if inner.is_cuda else inner.device
    form = f"{inner.dtype} {tuple(inner.shape)} {inner.stride()} {device}{placements}"
    bits = " conjugate" * inner.is_conj() + " negative" * inner.is_neg()
    return f"{type(tensor).__name__} {form}{bits}{' trained' * tensor.requires_grad}{'' if tensor.is_leaf else ' made'}"

"""Python values that a trace may read: what kind each is, what it consists of, whether two of them are equal, and whose
code it is: the user's, a package's, or of what a captured step takes as given."""

import array
import collections
import contextvars
import ctypes
import datetime
import enum
import functools
import importlib.util
import io
import numbers
import os
import pathlib
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_OWN = str(Path(__file__).parents[2]) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
#: Folders of packages, also of another Python that a virtual environment sees: some lie inside Python's own.
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

#: What torch is made with, and calls while it traces and compiles.
UNDER_TORCH = ("triton", "filelock", "sympy", "mpmath", "networkx", "jinja2", "fsspec")


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return os.path.dirname(found.origin) + os.sep if found and found.origin else _TORCH


_UNDER_TORCH = tuple(map(_folder, UNDER_TORCH))


@functools.lru_cache(maxsize=1 << 12)
def counts(file: str) -> bool:
    """Whether a file belongs to none of torch, its dependencies, NumPy, Python and stepgraph, whose code stays."""
    return not (is_under_torch(file) or is_pythons(file))


@functools.lru_cache(maxsize=1 << 12)
def is_under_torch(file: str) -> bool:
    """Whether a file belongs to torch, its dependencies, NumPy or stepgraph."""
    return file.startswith((_TORCH, *_UNDER_TORCH, _OWN, _NUMPY, "<frozen"))


def is_pythons(file: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return file.startswith(_PYTHON) and _PACKAGES.search(file) is None


def is_of_program(file: str) -> bool:
    """Whether a file belongs to the program itself, not to an installed package."""
    return counts(file) and not _PACKAGES.search(file)


@functools.lru_cache(maxsize=1 << 12)
def of_program(module: str | type | None) -> bool:
    """Whether a module, given its name or a class of it, belongs to the program itself; one without a file does."""
    if isinstance(module, type):  # a class that a call has made says that it is of Python's abc or types
        home, name = module.__module__, module.__name__
        module = None if home in ("abc", "types") and not hasattr(sys.modules[home], name) else home
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    return is_of_program(file) if isinstance(file, str) else module not in sys.builtin_module_names


def of_library(module: str | None) -> bool:
    """Whether a module, by its name, is one whose code is left unchanged."""
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    return module in sys.builtin_module_names if not isinstance(file, str) else not counts(file)


class NotedModule(types.ModuleType):
    """The class of a user's module while its reads are noted: ``seen`` is called with it, a name and the value."""

    seen: Callable[[types.ModuleType, str, Any], None] = staticmethod(lambda *_: None)

    def __getattribute__(self, name: str) -> Any:
        value = types.ModuleType.__getattribute__(self, name)  # super() fails if a trace on another thread ends here
        NotedModule.seen(self, name, value)
        return value


def counted_module(value: Any) -> bool:
    """Whether ``value`` is a module of the user's or of a package."""
    if not isinstance(value, types.ModuleType):
        return False
    if type(value) not in (types.ModuleType, NotedModule) and of_library(type(value).__module__):  # as torch.ops.aten
        return False
    file = getattr(value, "__file__", None) or next(iter(getattr(value, "__path__", ())), None)
    if file is not None:
        return counts(file)
    parent = sys.modules.get(value.__name__.rpartition(".")[0])  # as of torch._C._nn
    inside = getattr(getattr(value, "__spec__", None), "origin", None) in ("built-in", "frozen")
    return not inside if parent is None else counted_module(parent)


#: What is read where nothing is.
ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()
#: The attribute by which a function that a trace puts in another's place names that one.
BEHIND = "_stepgraph_behind"
#: Elements of the largest container, and bytes of the largest array, that are compared at each call.
LARGEST = 1 << 16

_ATOMS = (numbers.Number, str, bytes, enum.Enum, range, slice, type(None), type(...), np.generic, np.dtype)
_ATOMS += (torch.dtype, torch.device, torch.layout, torch.memory_format, pathlib.PurePath)
_ATOMS += (datetime.date, datetime.time, datetime.timedelta)
_BUFFERS = (np.ndarray, bytearray, memoryview, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_ITEMS = (type({}.items()), type(collections.OrderedDict().items()))
_VIEWS = tuple(type(view()) for d in ({}, collections.OrderedDict()) for view in (d.keys, d.values)) + _ITEMS
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType, *_VIEWS)
_REFERENCES = (weakref.ref, contextvars.ContextVar)
_CACHED = type(functools.lru_cache(len))
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
#: Python's own classes whose objects hold nothing that a step computes with.
_SILENT = ("logging", "_thread", "re", "typing", "contextvars", "warnings")
#: Rooms of this package whose objects serve the step itself.
_OURS = ("capture", "run", "passes", "graph", "step", "compat", "verify", "inductor", "lower", "parallel", "kernels")
_HEAP = 1 << 9
#: Kinds of values that are code, found in globals of packages only by identity.
CODE = ("function", "class", "namespace", "cached", "method", "opaque")


@functools.lru_cache(maxsize=1 << 14)
def kind_of(cls: type) -> str:
    """How objects of a class are compared.

    ``atom``, ``buffer``: by value. ``reference`` (weak ones, context variables): by what it refers to now.
    ``container`` and ``instance``, ``function``, ``method``, ``bound`` (a method written in C), ``partial``,
    ``descriptor``, ``cached``, ``class``, ``namespace`` (a module of Python): by their parts. ``module`` (of torch) and
    ``tensor``: by identity and state. ``opaque``: by identity. ``moving``: not at all, its state is out of sight.
    """
    bases: list[tuple[Any, str]] = [
        (torch.Tensor, "tensor"),
        (nn.Module, "module"),
        (_ATOMS, "atom"),
        (_BUFFERS, "buffer"),
        (types.FunctionType, "function"),
        (types.MethodType, "method"),
        ((types.BuiltinMethodType, types.MethodWrapperType), "bound"),
        (_REFERENCES, "reference"),
        (functools.partial, "partial"),
        (types.ModuleType, "namespace"),
        (type, "class"),
        (_CONTAINERS, "container"),
        (_DESCRIPTORS, "descriptor"),
        (_CACHED, "cached"),
        ((io.IOBase, threading.local), "moving"),
    ]
    found = next((kind for base, kind in bases if issubclass(cls, base)), None)
    if found is not None:
        return found
    if hasattr(cls, "__next__"):
        return "moving"
    module = cls.__module__
    if module.partition(".")[0] in _SILENT or module == "torch._ops" or _is_ours(module):  # operators cache dispatch
        return "opaque"
    return "instance" if cls.__flags__ & _HEAP or getattr(cls, "__dictoffset__", 0) else "opaque"


@functools.lru_cache(maxsize=1 << 12)
def has_more(cls: type) -> bool:
    """Whether plain values of a class may hold more than their value: of a class of the user's, such as an enum."""
    return bool(cls.__flags__ & _HEAP) and of_program(cls)


@functools.lru_cache(maxsize=1 << 12)
def is_hidden(cls: type) -> bool:
    """Whether objects of a class hold what no attribute shows, in fields of C that a base class adds."""
    slots = sum(isinstance(found, types.MemberDescriptorType) for base in cls.__mro__ for found in vars(base).values())
    shown = slots + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + shown * ctypes.sizeof(ctypes.c_void_p)


def behind(value: Any) -> Any:
    """The function that ``value`` has the place of while a step is traced; other values themselves."""
    return vars(value).get(BEHIND, value) if type(value) is types.FunctionType else value


def held_by(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, read past what its class does to reads; None if it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def class_of(cls: type, name: str) -> Any:
    """What a class or one that it inherits from has under ``name``, unbound; `ABSENT` for nothing."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), ABSENT)


def is_slot(found: Any) -> bool:
    """Whether what a class has under a name is a place in its objects: a slot, or an attribute of a class in C."""
    return isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType))


@functools.lru_cache(maxsize=1 << 12)
def slots_of(cls: type) -> frozenset[str]:
    """Names in ``__slots__`` of a class and its bases, as far as the user or a package defines them."""
    bases = [base for base in cls.__mro__ if base.__flags__ & _HEAP and not of_library(base.__module__)]
    places = (item for base in bases for item in vars(base).items())
    return frozenset(name for name, found in places if isinstance(found, types.MemberDescriptorType))


def in_slot(value: Any, name: str) -> Any:
    """The value in a slot, read without the class's own ``__getattribute__``; `ABSENT` if it is empty."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return ABSENT


def elements(container: Any) -> list[Any]:
    """What a container holds, keys of mappings first, or what a reference refers to; a class of its own has no say."""
    if isinstance(container, dict):
        kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict  # has its own order
        return [*kind.keys(container), *kind.values(container)]
    if isinstance(container, types.MappingProxyType):
        return [*container, *container.values()]
    if isinstance(container, _ITEMS):
        return list(chain.from_iterable(container))
    if isinstance(container, weakref.ref):
        return [container()]
    if isinstance(container, contextvars.ContextVar):
        return [container.get(ABSENT)]
    return list(next(kind for kind in _CONTAINERS if isinstance(container, kind)).__iter__(container))


def labelled(container: Any) -> Iterator[tuple[str, Any]]:
    """The elements of a container, each with its name in a path."""
    held = elements(container)
    if isinstance(container, (dict, types.MappingProxyType)):
        half = len(held) // 2
        for i, (key, value) in enumerate(zip(held[:half], held[half:], strict=True)):
            if key != "__builtins__":
                yield f"[{key!r}]" if kind_of(type(key)) == "atom" else f"[{i}]", value
        return
    fields = getattr(type(container), "_fields", None) if isinstance(container, tuple) else None
    names = [f".{name}" for name in fields] if fields else [f"[{i}]" for i in range(len(held))]
    yield from zip(names, held, strict=False)


def keys_of(container: Any) -> Iterator[Any]:
    """The keys of a mapping that are not plain values, such as functions."""
    if isinstance(container, (dict, types.MappingProxyType)):
        return (key for key in elements(container)[: len(container)] if kind_of(type(key)) != "atom")
    return iter(())


def is_flat(container: Any) -> bool:
    """Whether a container holds plain values alone."""
    return all(kind_of(type(item)) == "atom" and not has_more(type(item)) for item in elements(container))


def copied(container: Any) -> Any:
    """A copy of a flat container, for comparison."""
    if isinstance(container, (dict, types.MappingProxyType)):
        held = elements(container)
        return dict(zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True))
    return frozenset(container) if isinstance(container, (set, frozenset)) else elements(container)


def content(buffer: Any) -> tuple[Any, ...]:
    """What a buffer holds, for comparison."""
    if isinstance(buffer, np.ndarray):
        value = repr(buffer.tolist()) if buffer.dtype.hasobject else buffer.tobytes()
        return buffer.dtype, buffer.shape, buffer.strides, value
    if isinstance(buffer, torch.Tensor):
        return (
            buffer.dtype,
            buffer.shape,
            buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    return type(buffer), bytes(buffer)


def holds_objects(buffer: Any) -> bool:
    """Whether an array holds objects that are not plain values."""
    objects = isinstance(buffer, np.ndarray) and buffer.dtype.hasobject
    return objects and any(kind_of(type(item)) != "atom" for item in buffer.flat)


def size_of(value: Any) -> int:
    """Elements of a container, bytes of an array: what a comparison of it costs."""
    return value.nbytes if isinstance(value, np.ndarray) else len(value) if hasattr(value, "__len__") else 0


def equal(a: Any, b: Any) -> bool:
    """Whether two plain values or flat copies are the same to any code: of one type, and alike to the last sign."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(equal, chain(a, a.values()), chain(b, b.values())))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, frozenset):
        return a == b and {(type(x), repr(x)) for x in a} == {(type(x), repr(x)) for x in b}
    if isinstance(a, (float, complex, np.generic)):
        return repr(a) == repr(b)  # as text a number shows the sign of zero, and equals itself where it is NaN
    return bool(a == b)


def fake_inside(value: Any, depth: int = 4) -> bool:
    """Whether a value is a fake tensor or holds one."""
    from stepgraph import compat

    kind = kind_of(type(value))
    if kind == "tensor":
        return compat.is_fake(value)
    if kind == "container" and depth and len(value) <= LARGEST:
        return any(fake_inside(item, depth - 1) for item in elements(value))
    if kind == "instance" and depth:
        return any(fake_inside(item, depth - 1) for item in (held_by(value) or {}).values())
    return False


def _is_ours(module: str) -> bool:
    package, _, room = module.partition(".")
    return package == "stepgraph" and room.partition(".")[0] in _OURS

"""The parts of Python values: what can be read from a function, an object or a container, and how."""

import builtins
import collections
import contextlib
import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph.capture.python import values
from stepgraph.capture.python.values import counted_module, is_of_program, of_program

#: Functions that find a global or an attribute by its name in a string.
_BY_NAME = {"getattr", "hasattr", "globals", "vars"}


def globals_read(code: types.CodeType) -> list[str]:
    """Globals that a function names, or may name in a string."""
    read = dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return [*read, *(_strings(code) if _BY_NAME & read.keys() else ())]


def attributes_read(code: types.CodeType) -> set[str]:
    """Attributes that a function names, whatever it reads them of, what it imports from modules among them."""
    return (
        set(code.co_names).difference(globals_read(code)).union(_strings(code) if _BY_NAME & {*code.co_names} else ())
    )


def modules_imported(code: types.CodeType, package: str | None) -> Iterator[str]:
    """Full names of the modules that a function of ``package`` imports where it runs."""
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, name = before[-2].argval, instruction.argval
            with contextlib.suppress(ImportError):
                yield importlib.util.resolve_name("." * level + name, package) if level else name
            if not level:  # `import a.b` binds a
                yield name.partition(".")[0]
        before = [*before[-1:], instruction]


def _strings(code: types.CodeType) -> list[str]:
    return [value for value in code.co_consts if isinstance(value, str) and value.isidentifier()]


def all_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions that are written in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from all_inside(value)


#: What torch itself reads of a module to call it.
OF_TORCH = frozenset((*dir(nn.Module), *vars(nn.Module()))) - {"training", "forward"}
#: What ``nn.ParameterDict`` and ``nn.ParameterList`` hold, plain values among it.
_OF_CONTAINERS = ("_keys", "_size")


def is_torchs(module: nn.Module, name: str) -> bool:
    """Whether an attribute of a module is for torch's own class alone, such as the flat weights of an LSTM."""
    if isinstance(module, nn.RNNBase) and name.startswith("_flat_weight"):  # a class of the user's inherits them
        return True
    of_torch = name.startswith("_") and type(module).__module__.startswith("torch.nn.")
    return of_torch and name not in _OF_CONTAINERS


class Part(NamedTuple):
    """One value that is read of another.

    ``name``: what a path is continued by; a path of its own if ``absolute``. ``value``: what is there. ``how``: where
    it is read again: ``item`` (``key`` of the dict ``holder``), ``attribute`` (of ``holder``), or ``content`` (in the
    container it was found in). ``deep``: whether code that it is or holds is looked into.
    """

    name: str
    value: Any
    how: str = "content"
    holder: Any = None
    key: Any = None
    absolute: bool = False
    deep: bool = True


@functools.lru_cache(maxsize=1 << 12)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals and the attributes that a function, and those written in it, name."""
    inside = list(all_inside(code))
    names = dict.fromkeys(name for one in inside for name in globals_read(one))
    return tuple(names), frozenset().union(*map(attributes_read, inside))


@functools.lru_cache(maxsize=1 << 12)
def _imported(code: types.CodeType, package: str | None) -> tuple[str, ...]:
    """Modules that a function, and those written in it, import."""
    return tuple(dict.fromkeys(name for one in all_inside(code) for name in modules_imported(one, package)))


def globals_named(function: types.FunctionType) -> tuple[str, ...]:
    """Names of globals, and of Python's builtins, that the code of a function, of the user's or of a package, reads."""
    return _names(function.__code__)[0] if _is_read(function) else ()


def attributes_named(function: types.FunctionType) -> frozenset[str]:
    """Names of attributes that the code of a function, of the user's or of a package, reads of whatever it is."""
    return _names(function.__code__)[1] if _is_read(function) else frozenset()


def _is_read(function: types.FunctionType) -> bool:
    return not values.of_library(function.__globals__.get("__name__"))


def parts_of_function(function: types.FunctionType) -> Iterator[Part]:
    """Its code, closure, defaults and attributes, and of a user's or a package's the globals that it names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Part(f".{name}", cell.cell_contents, "attribute", cell, "cell_contents")
        except ValueError:  # nothing is in it yet
            continue
    positional = code.co_varnames[: code.co_argcount]
    for name, value in zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False):
        yield Part(f".{name}", value, "attribute", function, "__defaults__")
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Part(f".{name}", value, "item", function.__kwdefaults__, name)
    for name, value in vars(function).items():
        if not name.startswith("_torchdynamo"):
            yield Part(f".{name}", value, "item", vars(function), name)
    if not _is_read(function):
        return
    held, deep = function.__globals__, is_of_program(code.co_filename)
    for name in _names(code)[0]:
        if name in held or not hasattr(builtins, name):
            where = f"{held.get('__name__')}.{name}"
            yield Part(where, held.get(name, values.ABSENT), "item", held, name, absolute=True, deep=deep)
    for name in _imported(code, held.get("__package__")) if deep else ():
        if name in sys.modules:
            yield Part(name, sys.modules[name], "item", sys.modules, name, absolute=True)


def parts_of_instance(value: Any, names: Iterable[str] | None) -> Iterator[Part]:
    """What was read of an object, ``names``; of one whose reads are not seen (None) all that it holds."""
    held = values.held_by(value)
    if names is None or "__dict__" in names:
        names = [*(held or ()), *(n for cls in type(value).__mro__ for n in vars(cls) if values.is_slot(vars(cls)[n]))]
    for name in dict.fromkeys(names):
        if name.startswith("__") and name.endswith("__"):
            continue
        of_class = values.class_of(type(value), name)
        if held is not None and (name in held or of_class is values.ABSENT):
            found = held.get(name, values.ABSENT)
            computed = _computed(value, name) if found is values.ABSENT else values.ABSENT
            if computed is values.ABSENT:
                yield Part(f".{name}", found, "item", held, name)
            else:  # as by an attribute map of a configuration
                yield Part(f".{name}", computed, "attribute", value, name)
        elif values.is_slot(of_class) or held is None:
            yield Part(f".{name}", _computed(value, name), "attribute", value, name)
        else:
            yield Part(f".{name}", values.ABSENT, "item", held, name)  # its class has it, and the object itself may


def _computed(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, values.ABSENT)
    except Exception:  # a property that raises has no value: one that had a value at the capture counts as changed
        return values.ABSENT


def parts_of_class(cls: type, names: Callable[[str, Any], bool]) -> Iterator[Part]:
    """Methods and values of a class and its bases, by ``names``."""
    for base in _bases(cls):
        where = f"{base.__module__}.{base.__qualname__}"
        for name, value in list(vars(base).items()):
            if name != "__getattribute__" and names(name, value) and not values.is_slot(value):
                yield Part(f"{where}.{name}", value, "class", base, name, absolute=True)


def shadows_of_class(cls: type, names: Iterable[str]) -> Iterator[Part]:
    """For what was read of objects of a class: the classes of the user's that may get it in front of where it is."""
    for name in names:
        for base in _bases(cls):
            if name in vars(base):
                break
            if of_program(base):
                where = f"{base.__module__}.{base.__qualname__}.{name}"
                yield Part(where, values.ABSENT, "class", base, name, absolute=True)


_REPLACED = (nn.Module, torch.Tensor, torch.amp.GradScaler)


def _bases(cls: type) -> Iterator[type]:
    """A class and its bases, without what cannot change, and what is of every module or tensor: a trace replaces it."""
    return (base for base in cls.__mro__ if not (base.__flags__ & 1 << 8 or base in _REPLACED))


def parts_of_namespace(module: types.ModuleType, names: Iterable[str]) -> Iterator[Part]:
    """Those values of a module of Python, the user's or a package's, that code names; a user's code is looked into."""
    if counted_module(module):
        held, deep = vars(module), of_program(module.__name__)
        for name in sorted(held.keys() & {*names, "__getattr__"}):
            yield Part(f"{module.__name__}.{name}", held[name], "item", held, name, absolute=True, deep=deep)


def functions_of_library(module: types.ModuleType, names: Iterable[str]) -> Iterator[Part]:
    """The functions in a module of torch or Python that the code calls by name and that a program may replace."""
    if not counted_module(module):
        held = vars(module)
        for name in sorted(held.keys() & names):
            if isinstance(held[name], (types.FunctionType, types.BuiltinFunctionType)):
                yield Part(f"{module.__name__}.{name}", held[name], "item", held, name, absolute=True, deep=False)


def parts_of_container(value: Any) -> Iterator[Part]:
    """Its elements; of a mapping the keys too that are not plain values."""
    yield from (Part(name, item) for name, item in values.labelled(value))
    yield from (Part(f"[key {i}]", key) for i, key in enumerate(values.keys_of(value)))
    if isinstance(value, collections.defaultdict):
        yield Part(".default_factory", value.default_factory)


def plain_parts(value: Any) -> Iterator[Part]:
    """The parts of functions, methods, descriptors and containers, which no reads choose from."""
    match values.kind_of(type(value)):
        case "function":
            yield from parts_of_function(value)
        case "method":
            yield Part("", value.__func__)
            yield Part(".__self__", value.__self__)
        case "bound":
            if not isinstance(value.__self__, (types.ModuleType, type, type(None))):
                yield Part(".__self__", value.__self__)
        case "reference":
            yield from (Part("()", target) for target in values.elements(value))
        case "partial":
            yield from (Part(f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        case "descriptor":
            for name in ("fget", "fset", "__func__", "func"):
                if getattr(value, name, None) is not None:
                    yield Part(f".{name}", getattr(value, name))
        case "cached":
            yield Part(".__wrapped__", getattr(value, "__wrapped__", None))
        case "container":
            yield from parts_of_container(value)


def is_looked_into(part: Part) -> bool:
    """Whether a part is more than its identity: all data, and the code of a user's program."""
    return part.deep or values.kind_of(type(part.value)) not in values.CODE

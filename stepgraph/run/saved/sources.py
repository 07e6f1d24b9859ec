"""What a trace went through: source files by their content, and the global values that its functions name."""

import contextlib
import dis
import gc
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepgraph.run.saved.describe import Describer, Indescribable

_OWN = str(Path(__file__).parents[2]) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep

#: What torch is made with, and calls while it traces and compiles.
UNDER_TORCH = ("triton", "filelock", "sympy", "mpmath", "networkx", "jinja2", "fsspec")


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return os.path.dirname(found.origin) + os.sep if found and found.origin else _TORCH


_UNDER_TORCH = tuple(map(_folder, UNDER_TORCH))


def counts(file: str) -> bool:
    """Whether a file is of none of torch, what it is made with, NumPy, Python and stepgraph, which the key has by their
    versions."""
    if file.startswith((_TORCH, *_UNDER_TORCH, _OWN, _NUMPY, "<frozen")):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_PYTHON)


def _origin(code: types.CodeType, held: dict[str, Any]) -> str:
    """The file of a function; of generated code, such as a dataclass's methods, that of the module it was made in."""
    file = code.co_filename
    return held.get("__file__") or file if file.startswith("<") and not file.startswith("<frozen") else file


#: What is no global.
_NOTHING = object()


class Sources:
    """The functions that ran while `recorded`, and the environment variables that were read."""

    def __init__(self) -> None:
        self._codes: dict[types.CodeType, dict[str, Any]] = {}
        self._variables: set[str] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what runs inside, on this thread."""
        seen: dict[int, types.CodeType] = {}  # by id: to hash a code object is slow
        codes = self._codes

        with _outside_collections() as collecting:

            def note(frame: types.FrameType) -> None:
                code = frame.f_code
                if id(code) not in seen and not collecting:
                    seen[id(code)] = code
                    if counts(_origin(code, frame.f_globals)):
                        codes[code] = frame.f_globals

            watched = _monitored if sys.version_info >= (3, 12) else _profiled
            with _variables_read(self._variables), watched(note, collecting):
                yield

    def environment(self) -> dict[str, str | None]:
        """The variables that were read, with hashes of their values."""
        return described_environment(self._variables)

    def files(self) -> dict[str, str]:
        """Each source file with its hash. Raises `Indescribable` for code that is in no file."""
        found = {}
        for code, held in self._codes.items():
            name = code.co_filename
            if name.startswith("<") and ("__file__" in held or held.get("__name__") != "__main__"):
                continue  # made by what is in a file, as a dataclass's methods are
            if name not in found:
                digest = file_digest(name)
                if digest is None:
                    raise Indescribable(f"the function {code.co_name} of {name}, which is no file")
                found[name] = digest
        return found

    def globals(self) -> dict[str, dict[str, str]]:
        """Module -> name -> text of every global that the functions name. Raises `Indescribable`."""
        names: dict[str, set[str]] = {}
        modules: dict[str, dict[str, Any]] = {}
        for code, held in self._codes.items():
            module = held.get("__name__", "")
            if code.co_name == "<module>":
                continue  # an import: what it made is described where functions name it
            if sys.modules.get(module) is None or vars(sys.modules[module]) is not held:
                continue  # generated code, whose globals are its maker's
            modules[module] = held
            names.setdefault(module, set()).update(_named(code))
        return {module: described_globals(module, sorted(names[module])) for module in modules}


def _named(code: types.CodeType) -> Iterator[str]:
    """Globals that a function names; those of a module as ``module.name``, whatever else ``.name`` is read of."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    yield from read
    attributes = set(code.co_names).difference(read)
    yield from (f"{name}.{inside}" for name in dict.fromkeys(read) for inside in attributes)


def described_globals(module: str, names: list[str]) -> dict[str, str]:
    """The text of those ``names`` that are globals of ``module``. Raises `Indescribable`; ``ImportError`` where there
    is no such module."""
    held = vars(importlib.import_module(module))  # a forward may be the first to import it
    describe, found = Describer(), {}
    for name in names:
        outer, _, inside = name.partition(".")
        value = held.get(outer, _NOTHING)
        if inside:
            own = isinstance(value, types.ModuleType) and counts(getattr(value, "__file__", None) or _TORCH)
            value = vars(value).get(inside, _NOTHING) if own else _NOTHING
        if value is not _NOTHING:  # else a built-in
            found[name] = _shortened(describe(value, f"{module}.{name}"))
    return found


def _shortened(text: str) -> str:
    return text if len(text) < 80 else f"#{hashlib.sha256(text.encode()).hexdigest()}"


def file_digest(name: str) -> str | None:
    """The hash of a file, None where there is none."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return None


def described_environment(names: Iterable[str]) -> dict[str, str | None]:
    """Hashes of the values of environment variables, None for one that is not set."""
    return {n: hashlib.sha256(os.environ[n].encode()).hexdigest() if n in os.environ else None for n in sorted(names)}


@contextlib.contextmanager
def _variables_read(names: set[str]) -> Iterator[None]:
    """Names of environment variables that are read inside go to ``names``."""
    kind = type(os.environ)
    read = kind.__getitem__

    def noted(environment: Any, name: str) -> str:
        names.add(name)
        return read(environment, name)

    kind.__getitem__ = noted
    try:
        yield
    finally:
        kind.__getitem__ = read


@contextlib.contextmanager
def _outside_collections() -> Iterator[list[str]]:
    """Gives what is empty but while garbage is collected: what runs then is no part of the trace."""
    collecting: list[str] = []

    def begin(phase: str, _: Any) -> None:
        if phase == "start":
            collecting.append(phase)

    def end(phase: str, _: Any) -> None:
        if phase == "stop":
            collecting.clear()

    gc.callbacks.insert(0, begin)
    gc.callbacks.append(end)
    try:
        yield collecting
    finally:
        gc.callbacks.remove(begin)
        gc.callbacks.remove(end)


@contextlib.contextmanager
def _profiled(note: Callable[[types.FrameType], None], _: Any) -> Iterator[None]:
    """``note`` sees the calls of functions."""
    outer = sys.getprofile()
    sys.setprofile(lambda frame, event, _: note(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(outer)


@contextlib.contextmanager
def _monitored(note: Callable[[types.FrameType], None], collecting: Sequence[str]) -> Iterator[None]:
    """``note`` sees the first call of each function but while ``collecting``: what `sys.setprofile` does, at no cost
    for later calls."""
    monitoring = sys.monitoring
    tool = next((i for i in range(5, -1, -1) if monitoring.get_tool(i) is None), None)
    if tool is None:
        raise RuntimeError("no tool number of sys.monitoring is free: end a profiler or a debugger")
    monitoring.use_tool_id(tool, "stepgraph")

    def start(code: types.CodeType, _offset: int) -> Any:
        if collecting:
            return None
        note(sys._getframe(1))
        return monitoring.DISABLE

    monitoring.register_callback(tool, monitoring.events.PY_START, start)
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)
        monitoring.restart_events()

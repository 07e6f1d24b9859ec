"""What a trace went through: source files by their content, the global values that its functions name, and what they
read of the environment and of files."""

import builtins
import contextlib
import gc
import hashlib
import importlib
import io
import os
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepgraph.run.saved.reads.code import attributes_read, globals_read, imports
from stepgraph.run.saved.reads.describe import Describer, Indescribable, Unknown
from stepgraph.run.saved.reads.places import counted_module, counts, file_digest, is_imported, is_of_program, origin

#: What is no global.
_NOTHING = object()
#: Module -> name -> text of a global, ``name.inside`` for what a module holds.
Globals = dict[str, dict[str, str]]


class Sources:
    """The functions that ran while `recorded`, and what of the environment and of files was read.

    ``before``: texts of globals as they were before, where they are known; a trace may write to them.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = {}
        self._variables: set[str] = set()
        self._read: set[str] = set()
        self.before: Globals = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what runs inside, on this thread and those of autograd."""
        seen: dict[
            tuple[int, int], types.CodeType
        ] = {}  # by id: code of two files may be equal, and to hash it is slow
        codes = self._codes

        with _outside_collections() as collecting:

            def note(frame: types.FrameType) -> None:
                code, held = frame.f_code, frame.f_globals
                place = id(code), id(held)
                if place not in seen and not collecting:
                    seen[place] = code
                    if counts(origin(code, held)):
                        codes[place] = code, held

            watched = _monitored if sys.version_info >= (3, 12) else _profiled
            with _variables_read(self._variables), _files_read(self._read), watched(note, collecting):
                yield

    def environment(self) -> dict[str, str | None]:
        """The variables that were read, with hashes of their values."""
        return described_environment(self._variables)

    def read(self) -> dict[str, str]:
        """Each file that was read, with its hash. Raises `Indescribable` for one that is gone."""
        found = {}
        for name in sorted(self._read):
            digest = file_digest(name)
            if digest is None:
                raise Indescribable(f"the file {name}, which is read and no longer there")
            found[name] = digest
        return found

    def files(self) -> dict[str, tuple[str | None, str]]:
        """Each source file with the module that it is of, if that is imported by its name, and its hash. Raises
        `Indescribable` for code that is in no file."""
        found = {}
        for code, held in self._codes.values():
            name = code.co_filename
            if name.startswith("<") and ("__file__" in held or held.get("__name__") != "__main__"):
                continue  # made by what is in a file, as a dataclass's methods are
            module = held["__name__"] if is_imported(held) and held.get("__file__") == name else None
            if found.get(name, (None,))[0] is None:
                digest = file_digest(name)
                if digest is None:
                    raise Indescribable(f"the function {code.co_name} of {name}, which is no file")
                found[name] = module, digest
        return found

    def globals(self, open: Mapping[Any, Any]) -> Globals:
        """The text of every global that the functions name, of what they import, and of what they may read of modules
        that are ``open`` (see `Describer`). Raises `Indescribable`."""
        names: defaultdict[str, set[str]] = defaultdict(set)
        anywhere: set[str] = set()
        for code, held in self._codes.values():
            attributes = attributes_read(code)
            anywhere |= attributes
            if code.co_name == "<module>":
                continue  # an import: what it made is described where functions name it
            if is_imported(held):  # else generated code, which is described with what it names
                names[held["__name__"]].update(_paths(held, globals_read(code), attributes))
            for module in filter(counted_module, map(sys.modules.get, imports(code, held))):
                names[module.__name__].update(_paths(vars(module), attributes, attributes))
        open, seen = dict(open), set()
        while True:
            found = {name: described_globals(name, sorted(names[name]), open) for name in sorted(names)}
            if open.keys() == seen:
                return {name: texts | _common(self.before.get(name, {}), texts) for name, texts in found.items()}
            for key in open.keys() - seen:
                seen.add(key)
                self._check(open[key], anywhere)
                if counted_module(open[key]):
                    names[_imported_name(open[key])].update(_paths(vars(open[key]), anywhere, anywhere))

    def _check(self, value: Any, anywhere: set[str]) -> None:
        """Raise for what is unknown and read, and for a function whose cache answered: what that was computed of was
        not seen."""
        if isinstance(value, Unknown) and value.name in anywhere:
            raise Indescribable(value.reason)
        code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
        unseen = isinstance(code, types.CodeType) and not any(code is one for one, _ in self._codes.values())
        if unseen and is_of_program(code.co_filename) and value.cache_info().currsize:
            raise Indescribable(f"what {value.__qualname__} has in its cache since before the capture")


def _imported_name(module: types.ModuleType) -> str:
    if sys.modules.get(module.__name__) is not module:
        raise Indescribable(f"the module {module.__name__}, which is not imported by its name")
    return module.__name__


def _common(texts: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: texts[name] for name in names if name in texts}


def _paths(held: Mapping[str, Any], names: Iterable[str], inside: Iterable[str], seen: Any = None) -> Iterator[str]:
    """Those of ``names`` that ``held`` has, and what is read of the modules among them: ``module.name`` for each name
    ``inside``, whatever else that is read of."""
    seen = set() if seen is None else seen
    for name in sorted(names):
        value = held.get(name, _NOTHING)
        if value is _NOTHING:  # a built-in
            continue
        yield name
        if counted_module(value) and id(value) not in seen:
            seen.add(id(value))
            yield from (f"{name}.{path}" for path in _paths(vars(value), inside, inside, seen))


def described_globals(module: str, names: Iterable[str], open: dict[Any, Any] | None = None) -> dict[str, str]:
    """The text of those ``names`` that are globals of ``module``; what is ``open`` in them is added there. Raises
    `Indescribable`; ``ImportError`` where there is no such module."""
    imported = importlib.import_module(module)  # a forward may be the first to import it
    found = {}
    for name in names:
        value: Any = imported
        for part in name.split("."):
            value = vars(value).get(part, _NOTHING) if isinstance(value, types.ModuleType) else _NOTHING
        if value is not _NOTHING:
            describe = Describer(open=None if isinstance(value, types.ModuleType) else open)  # its paths are known
            found[name] = _shortened(describe(value, f"{module}.{name}"))
    return found


def _shortened(text: str) -> str:
    return text if len(text) < 80 else f"#{hashlib.sha256(text.encode()).hexdigest()}"


def changed_since(record: Mapping[str, Any], sources: Sources) -> str | None:
    """The source file, environment variable, file or global value that is not what it was, or None. The globals as they
    are go to ``sources.before``."""
    before: Globals = {}
    try:
        for module, saved in record["globals"].items():
            before[module] = described_globals(module, sorted(saved))
    except ImportError:
        return f"the module {module}, which cannot be imported,"
    except Indescribable as reason:
        return f"a global: {reason}"
    sources.before = before
    now = described_environment(record["environment"])
    for name, text in record["environment"].items():
        if now[name] != text:
            return f"the environment variable {name}"
    for name, (module, digest) in record["sources"].items():
        # Another copy of a module may be the one that is imported here.
        file = name if module is None else getattr(sys.modules.get(module), "__file__", None) or name
        if file_digest(file) != digest:
            return f"the source file {file}"
    for file, digest in record["read"].items():
        if file_digest(file) != digest:
            return f"the file {file}"
    for module, saved in record["globals"].items():
        for name, text in saved.items():
            if before[module].get(name) != text:
                return f"the global {module}.{name}"
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
def _files_read(names: set[str]) -> Iterator[None]:
    """Names of files that are opened inside to be read go to ``names``, but those that the key has by versions."""
    opened = builtins.open

    def noted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = opened(file, mode, *args, **kwargs)
        if isinstance(file, str | bytes | os.PathLike) and not {"w", "a", "x"} & {*mode}:
            name = os.fsdecode(file)
            if os.path.isfile(name) and counts(os.path.abspath(name)) and not name.startswith(("/proc/", "/sys/")):
                names.add(name)
        return stream

    builtins.open = io.open = noted
    try:
        yield
    finally:
        builtins.open = io.open = opened


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
    """``note`` sees the calls of functions; a profiler that is on does not see those of inside."""
    outer = sys.getprofile()
    sys.setprofile(lambda frame, event, _: note(frame) if event == "call" else None)
    try:
        yield
    finally:
        if outer is None or callable(outer):
            sys.setprofile(outer)
        else:  # cProfile's, which is no function
            sys.setprofile(None)
            outer.enable()


@contextlib.contextmanager
def _monitored(note: Callable[[types.FrameType], None], collecting: Sequence[str]) -> Iterator[None]:
    """``note`` sees the first call of each function but while ``collecting``: what `sys.setprofile` does, at no cost
    for later calls. Threads that the program has already, as one that loads data, are no part of the trace."""
    monitoring = sys.monitoring
    tool = next((i for i in range(5, -1, -1) if monitoring.get_tool(i) is None), None)
    if tool is None:
        raise RuntimeError("no tool number of sys.monitoring is free: end a profiler or a debugger")
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    monitoring.use_tool_id(tool, "stepgraph")

    def start(code: types.CodeType, _offset: int) -> Any:
        if collecting or threading.get_ident() in others:
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

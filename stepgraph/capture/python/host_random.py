"""The random generators of the host: Python's ``random`` and NumPy's. Their numbers would be constants of a graph."""

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from stepgraph import compat

#: A generator: how to read its state, and how to set it.
_Access = tuple[Callable[[], Any], Callable[[Any], None]]


class _Entropy:
    """Counts draws of the user's code from the operating system's random numbers, which have no state to compare:
    ``os.urandom``, ``secrets``, ``uuid``, generators created without a seed."""

    def __init__(self) -> None:
        self.drawn = 0

    @contextlib.contextmanager
    def counted(self, is_user_file: Callable[[str], bool]) -> Iterator[None]:
        plain, tracing = os.urandom, threading.get_ident()

        def urandom(size: int) -> bytes:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and _is_library(frame.f_code.co_filename):
                frame = frame.f_back
            ours = frame is not None and threading.get_ident() == tracing
            self.drawn += ours and is_user_file(frame.f_code.co_filename)
            return plain(size)

        with compat.replaced(os, urandom=urandom), compat.replaced(random, _urandom=urandom):
            yield


ENTROPY = _Entropy()


class HostRandom:
    """States of random generators on the host at one moment: the global generators, the generators that modules of
    ``model`` hold, and what is added later."""

    def __init__(self, model: nn.Module | None = None):
        self._accesses = _accesses(model)
        held = [value for module in (model.modules() if model is not None else ()) for value in vars(module).values()]
        held += [getattr(get, "__self__", None) for get, _ in self._accesses.values()]
        self._met = {id(value): value for value in held}
        self._states = {name: get() for name, (get, _) in self._accesses.items()}

    def add(self, name: str, value: Any) -> None:
        """Another generator, from its current state on."""
        access = _access(value, sys.modules.get("numpy"))
        if access is not None and id(value) not in self._met:
            self._met[id(value)] = value
            name = f"the generator {name}"
            self._accesses[name], self._states[name] = access, access[0]()

    def moved(self) -> list[str]:
        """Names of the generators that another state has by now."""
        return [name for name, (get, _) in self._accesses.items() if not _same(get(), self._states[name])]

    def accept(self) -> None:
        """From here on, what moved until now counts as unmoved."""
        self._states = {name: get() for name, (get, _) in self._accesses.items()}

    def kept(self) -> dict[str, Any]:
        """The states of that moment, to be `put` back after others were accepted."""
        return dict(self._states)

    def put(self, states: dict[str, Any]) -> None:
        """Go back to ``states`` as the ones of that moment; a generator that was added since keeps its own."""
        self._states |= states
        self.restore()

    def restore(self) -> None:
        """Give each generator its state of that moment."""
        for name, (_, set_state) in self._accesses.items():
            set_state(self._states[name])


def _accesses(model: nn.Module | None) -> dict[str, _Access]:
    found: dict[str, _Access] = {
        "Python's random": (random.getstate, random.setstate),
        "the system's entropy": (lambda: ENTROPY.drawn, lambda drawn: setattr(ENTROPY, "drawn", drawn)),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy.random"] = (numpy.random.get_state, numpy.random.set_state)
    for path, module in model.named_modules() if model is not None else ():
        for key, value in vars(module).items():
            access = _access(value, numpy)
            if access is not None:
                found[f"the generator {path + '.' if path else ''}{key}"] = access
    return found


def _access(value: Any, numpy: Any) -> _Access | None:
    """How to read and set the state of ``value``, if it is a generator of the host."""
    if isinstance(value, random.SystemRandom):
        return None  # see `_Entropy`
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        return lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state)
    return None


def _same(a: Any, b: Any) -> bool:
    """Equality of states: nested tuples and dictionaries of numbers and NumPy arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else a == b


class LineOfDraw:
    """Finds the line that moves the host's generators: watches every line of the user's code while inside.

    Slow; for a second look at a step that is known to draw. ``source``: ``file:line``, or "" if none was seen.
    ``stack``: paths of the modules that run; ``path``: the innermost of them at that line.
    """

    def __init__(self, before: HostRandom, is_user_file: Callable[[str], bool], stack: Sequence[str]):
        self.source, self.path = "", ""
        self._before, self._is_user_file, self._stack = before, is_user_file, stack
        self._last: dict[FrameType, int] = {}

    def __enter__(self) -> "LineOfDraw":
        self._outer = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)
        self._last.clear()

    def _enter_frame(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if self.source or not self._is_of_user(frame):
            return None
        if self._before.moved():  # drawn on the caller's line, before it called
            caller = frame.f_back
            while caller is not None and not self._is_of_user(caller):
                caller = caller.f_back
            if caller is not None:
                self._found(caller, caller.f_lineno)
            return None
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, _argument: Any) -> Any:
        """Called before each line, and at the frame's end; the line that ran last is then done."""
        if self.source:
            return None
        last = self._last.pop(frame, None)
        if last is not None and self._before.moved():
            self._found(frame, last)
            return None
        if event == "line":
            self._last[frame] = frame.f_lineno
        return self._in_frame

    def _found(self, frame: FrameType, line: int) -> None:
        self.source = f"{frame.f_code.co_filename}:{line}"
        self.path = self._stack[-1] if self._stack else ""

    def _is_of_user(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return self._is_user_file(file) and not _is_library(file)


_STANDARD_LIBRARY = os.path.dirname(random.__file__) + os.sep


def _is_library(file: str) -> bool:
    """Whether the file belongs to Python or NumPy, where a draw has no user line."""
    numpy = sys.modules.get("numpy")
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return (file.startswith(_STANDARD_LIBRARY) and not installed) or (
        numpy is not None and file.startswith(numpy.__path__[0])
    )

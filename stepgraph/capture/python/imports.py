"""Modules that are imported while a step is traced.

Their code runs once in a process: what it leaves in objects that the trace has met, such as implementations in a
registry, is there before every later step and is no change of this one.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Around:
    """A loader that runs the code of a module inside ``context``."""

    def __init__(self, inner: Any, context: Callable[[], contextlib.AbstractContextManager[None]]):
        self.inner, self.context = inner, context

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        with self.context():
            self.inner.exec_module(module)


class _Finder:
    """Finds modules as the other finders do, for one thread."""

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[None]]):
        self.context, self.thread, self.inside = context, threading.get_ident(), False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self.inside or threading.get_ident() != self.thread:  # what an import imports is a part of it
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Around(spec.loader, self._once)  # pyrefly: ignore
        return spec

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        self.inside = True
        try:
            with self.context():
                yield
        finally:
            self.inside = False


@contextlib.contextmanager
def around_imports(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, the code of each module that this thread imports for the first time, with all that it imports in turn,
    runs inside a ``context()``."""
    finder = _Finder(context)
    sys.meta_path.insert(0, finder)  # pyrefly: ignore
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # pyrefly: ignore

"""What ``type(tensor)`` is in eager: the tensors of a trace are of a class of their own.

The user's functions find ``type`` among Python's builtins. While they are traced, modules whose functions name it have
a class of that name, which answers for a fake tensor as eager would and is Python's for all else.
"""

import builtins
import contextlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from stepgraph import compat
from stepgraph.capture.python import parts
from stepgraph.capture.python.places import is_of_program


def type_of(value: Any) -> type:
    """``type(value)`` as eager has it, and `TYPE` for ``type``."""
    found = type(value)
    if found is compat.FakeTensor:
        return compat.class_in_eager(value)
    return TYPE if found is type else found


class _AsEager(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type_of(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type)

    def __eq__(cls, other: Any) -> bool:
        return other is type or other is TYPE

    __hash__ = type.__hash__


class TYPE(type, metaclass=_AsEager):
    """What ``type`` is in these modules."""


TYPE.__name__ = TYPE.__qualname__ = "type"
TYPE.__module__ = "builtins"


class TensorTypes:
    """The modules of the functions that a trace meets, by what their code names."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []
        self._put: list[dict[str, Any]] | None = None

    def add(self, function: FunctionType) -> None:
        """A function that may run in the trace."""
        held = function.__globals__
        if is_of_program(function.__code__.co_filename) and "type" in parts.globals_named(function):
            self._found.append(held)
            self._replace(held)

    def _replace(self, held: dict[str, Any]) -> None:
        own = held.get("__builtins__")
        if self._put is not None and "type" not in held and own in (builtins, vars(builtins)):
            held["type"] = TYPE
            self._put.append(held)

    @contextlib.contextmanager
    def as_eager(self) -> Iterator[None]:
        """Inside, these modules have eager's answers."""
        self._put = []
        try:
            for held in self._found:
                self._replace(held)
            yield
        finally:
            for held in self._put:
                held.pop("type", None)
            self._put = None

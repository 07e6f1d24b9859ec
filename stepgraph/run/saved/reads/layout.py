"""What of an object lies where Python sees it, in its ``__dict__`` and slots, and what a class in C keeps beside."""

import contextlib
import types
from typing import Any

_HEAP = 1 << 9  # of a class that is made at run time, as those of Python's ``class`` statements are
_OWN = ("__dict__", "__weakref__")
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_IN_C += (types.GetSetDescriptorType,)


def base_in_c(kind: type) -> type:
    """The class in C that says what objects of ``kind`` hold beside their ``__dict__`` and slots: ``list`` of one that
    inherits from it, ``object`` where they hold no more."""
    return next(cls for cls in kind.__mro__ if not _is_in_python(cls) and (_holds(cls) or cls is object))


def _holds(cls: type) -> bool:
    return cls.__basicsize__ > object.__basicsize__ or cls.__itemsize__ > 0


def _is_in_python(cls: type) -> bool:
    """Whether a ``class`` statement made it: those of C have methods and attributes in C of their own."""
    if not cls.__flags__ & _HEAP:
        return False
    return not any(
        isinstance(value, _IN_C) and value.__objclass__ is cls for name, value in vars(cls).items() if name not in _OWN
    )


def slots_of(value: Any) -> dict[str, Any]:
    """What ``value`` has in slots, by class and name; those of another class may have the same."""
    found = {}
    for cls in type(value).__mro__:
        if _is_in_python(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # nothing is in it
                        found[f"{cls.__qualname__}.{name}"] = slot.__get__(value)
    return found

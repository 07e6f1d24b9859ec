"""Reads JSON values back as the dataclasses that they were written from."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal

from stepgraph.errors import unknown_name


def decode(hint: Any, value: Any, where: str) -> Any:
    """``value`` from JSON as the type ``hint``; ``where`` names it in errors.

    Raises ``ValueError``, in one line, for a value of another type, a name that is not known, and one that is missing.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(value):  # the model, decoded already: its class depends on the family
        return value
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        if any(typing.get_origin(arg) is Literal and value in typing.get_args(arg) for arg in args):
            return value
        return decode(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list):
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(items) == len(value):
            return tuple(decode(item, part, where) for item, part in zip(items, value, strict=True))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (bool, int, str) and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r} in a run's configuration must be {_told(hint)}")


def _told(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
    return "str" if hint is Path else getattr(hint, "__name__", str(hint))


def _dataclass(hint: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}={value!r} in a run's configuration must be an object")
    hints = typing.get_type_hints(hint)
    names = [field.name for field in dataclasses.fields(hint) if field.init]
    for name in value:
        if name not in names:
            raise unknown_name(f"name in the {where} of a run", name, names)
    if missing := [name for name in names if name not in value]:
        raise ValueError(
            f"the {where} of a run lacks {', '.join(missing)}: give all of it, or use the stepgraph that wrote it"
        )
    return hint(**{name: decode(hints[name], value[name], name) for name in names})

"""Finds the names that code reads."""

import contextlib
import dis
import importlib.util
import types
from collections.abc import Iterator

#: Functions that find a global or an attribute by its name in a string.
_BY_NAME = {"getattr", "globals", "vars"}


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

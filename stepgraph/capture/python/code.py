"""What code says: the names that it reads."""

import dis
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


def _strings(code: types.CodeType) -> list[str]:
    return [value for value in code.co_consts if isinstance(value, str) and value.isidentifier()]


def all_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions that are written in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from all_inside(value)

"""What code says: its text as a hash, and the names that it reads."""

import dis
import hashlib
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

#: Functions that find a global or an attribute by its name in a string.
_BY_NAME = {"getattr", "globals", "vars"}


def code_digest(code: types.CodeType) -> str:
    """A hash of what a function does, without where it is written."""
    takes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    text = repr((code.co_code, code.co_exceptiontable, _constant(code.co_consts), *takes, *names))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: Any) -> Any:
    """A constant of a function as text; a set, as of ``x in {"a", "b"}``, has another order in every process."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, (tuple, frozenset)):
        items = [str(_constant(item)) for item in value]
        return f"set{sorted(items)}" if isinstance(value, frozenset) else items
    return repr(value)


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


def imports(code: types.CodeType, held: dict[str, Any]) -> Iterator[str]:
    """The names of modules that a function with the globals ``held`` imports."""
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for level, i in zip(instructions, instructions[2:], strict=False):  # (level, what of it, the import)
        if i.opname == "IMPORT_NAME":
            package = held.get("__package__") or str(held.get("__name__")).rpartition(".")[0]
            parts = importlib.util.resolve_name("." * (level.argval or 0) + i.argval, package).split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def all_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions that are written in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from all_inside(value)

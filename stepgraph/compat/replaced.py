"""Temporarily replaces attributes of modules and classes."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, names of ``owner``, a module or a class, have other values."""
    saved = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def replaced_functions(owner: Any, **values: Any) -> Iterator[None]:
    """`replaced` for functions of torch. Dynamo lists these once, at its first use; the list is made before they are
    replaced, or it would have the replacements for the rest of the process."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map  # a second to load, which a trace needs at any rate

    get_torch_obj_rule_map()
    with replaced(owner, **values):
        yield

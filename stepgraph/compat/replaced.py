"""Names of modules and classes that have other values for a while."""

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
    """`replaced` for functions of torch, of which Dynamo keeps a list that it makes at its first use: of those that
    there are otherwise."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map  # a second to load, which a trace needs at any rate

    get_torch_obj_rule_map()
    with replaced(owner, **values):
        yield

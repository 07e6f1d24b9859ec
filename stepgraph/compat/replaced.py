"""Names of torch's modules that have other values for a while."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Inside, names of ``module`` have other values."""
    saved = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(saved)

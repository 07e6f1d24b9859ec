"""What ``compute_loss`` reads and sets of a trainer while it is traced: values read are constants of the graph."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.capture.python.reads import PLAIN
from stepgraph.errors import CaptureError


class Reads:
    """Numbers, strings and flags that were read of objects' attributes while `noted`."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    @contextlib.contextmanager
    def noted(self, *owners: Any) -> Iterator[None]:
        """Note what is read of ``owners`` inside. Raises `CaptureError` for what is set there, as later steps do not.

        They get another class meanwhile, so that ``super()`` in a method works as ever.
        """
        kinds, before = list(map(type, owners)), [dict(vars(owner)) for owner in owners]
        for owner, kind in zip(owners, kinds, strict=True):
            owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": self._noting(kind)})
        try:
            yield
        finally:
            for owner, kind in zip(owners, kinds, strict=True):
                owner.__class__ = kind
        for owner, held in zip(owners, before, strict=True):
            for name, value in vars(owner).items():
                if value is not held.get(name, owner) and isinstance(value, (torch.Tensor, *PLAIN)):
                    raise CaptureError(
                        f"compute_loss sets {type(owner).__name__}.{name}, and a captured step runs Python only while "
                        "it is traced; set it outside, such as in a callback"
                    )

    def _noting(self, kind: type) -> Any:
        def noting(owner: Any, name: str) -> Any:
            value = kind.__getattribute__(owner, name)
            # What is computed anew at each read, such as a property, is not held.
            if isinstance(value, PLAIN) and name in object.__getattribute__(owner, "__dict__"):
                self._values.setdefault((id(owner), name), (owner, name, value))
            return value

        return noting

    def change(self) -> str | None:
        """What has changed since, in words; None if nothing has."""
        for owner, name, old in self._values.values():
            now = vars(owner).get(name)
            if now is not old and repr(now) != repr(old):
                return f"{type(owner).__name__}.{name} changed from {old!r} to {now!r}"
        return None

    def clear(self) -> None:
        self._values.clear()

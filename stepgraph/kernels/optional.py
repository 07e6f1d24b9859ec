"""Packages that are used where they are installed."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType


class Package:
    """The package that pip knows as ``name``. ``module``: what is imported of it, with the ``needed`` names, which
    other versions may lack. ``instead``: what to choose without it."""

    def __init__(self, name: str, module: str, needed: tuple[str, ...], installed: Callable[[], bool], instead: str):
        self.name, self.module, self.needed, self.instead = name, module, needed, instead
        #: Whether it is installed: nothing is imported.
        self.installed = installed
        self.unavailable = functools.cache(self._unavailable)

    def _unavailable(self) -> str | None:
        """Why the package cannot be used in this process, in one line; None where it can. Loading it takes seconds."""
        if not self.installed():
            return f"{self.name} is not installed"
        try:
            found = importlib.import_module(self.module)
            for name in self.needed:
                getattr(found, name)
        except Exception as error:  # it may not fit what it is built on
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"{self.name} cannot be imported: {reason}"
        return None

    def load(self) -> ModuleType:
        """Its module. Raises ``ValueError`` where it cannot be used."""
        if (why := self.unavailable()) is not None:
            raise ValueError(f"{why}: pip install {self.name}, or choose {self.instead}")
        return importlib.import_module(self.module)

"""Where code comes from: the user's program, a package, or what a captured step takes as given."""

import functools
import importlib.util
import os
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

_OWN = str(Path(__file__).parents[2]) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
#: Folders of packages, also of another Python that a virtual environment sees: some lie inside Python's own.
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

#: What torch is made with, and calls while it traces and compiles.
UNDER_TORCH = ("triton", "filelock", "sympy", "mpmath", "networkx", "jinja2", "fsspec")


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return os.path.dirname(found.origin) + os.sep if found and found.origin else _TORCH


_UNDER_TORCH = tuple(map(_folder, UNDER_TORCH))


@functools.lru_cache(maxsize=1 << 12)
def counts(file: str) -> bool:
    """Whether a file is of none of torch, what it is made with, NumPy, Python and stepgraph: their code stays."""
    return not (is_under_torch(file) or is_pythons(file))


@functools.lru_cache(maxsize=1 << 12)
def is_under_torch(file: str) -> bool:
    """Whether a file is of torch, what it is made with, NumPy and stepgraph."""
    return file.startswith((_TORCH, *_UNDER_TORCH, _OWN, _NUMPY, "<frozen"))


def is_pythons(file: str) -> bool:
    """Whether a file is of Python's own library."""
    return file.startswith(_PYTHON) and _PACKAGES.search(file) is None


def is_of_program(file: str) -> bool:
    """Whether a file is of the program itself, and of no package that is installed."""
    return counts(file) and not _PACKAGES.search(file)


@functools.lru_cache(maxsize=1 << 12)
def of_program(module: str | None) -> bool:
    """Whether a module, by its name, is of the program itself; one without a file is."""
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    return is_of_program(file) if isinstance(file, str) else module not in sys.builtin_module_names


def of_library(module: str | None) -> bool:
    """Whether a module, by its name, is one whose code stays as it is."""
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    return module in sys.builtin_module_names if not isinstance(file, str) else not counts(file)


def counted_module(value: Any) -> bool:
    """Whether ``value`` is a module of the user's or of a package."""
    if not isinstance(value, types.ModuleType):
        return False
    if type(value) is not types.ModuleType and of_library(type(value).__module__):  # as torch.ops.aten
        return False
    file = getattr(value, "__file__", None) or next(iter(getattr(value, "__path__", ())), None)
    if file is not None:
        return counts(file)
    parent = sys.modules.get(value.__name__.rpartition(".")[0])  # as of torch._C._nn
    inside = getattr(getattr(value, "__spec__", None), "origin", None) in ("built-in", "frozen")
    return not inside if parent is None else counted_module(parent)

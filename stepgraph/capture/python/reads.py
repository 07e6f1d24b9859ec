"""What Python reads of a model's modules while a step is traced, and whether it has changed since.

Numbers, strings and flags that forward reads from its modules (``dropout.p``, ``attention.scaling``) are constants of
the graph, and so are hooks, submodules and methods. `Reads` notes them during the trace; `Plain` compares them before
each call, in loops of the interpreter itself: those that the step never reads cost nothing and may change freely.
"""

import contextlib
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from operator import eq, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stepgraph import compat

#: Types of values that forward reads as constants.
PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)
_TYPES = frozenset(PLAIN)
_READ = _TYPES | {FunctionType, MethodType}

#: Containers of plain values, up to so many, which are compared by what they hold.
_CONTAINERS = frozenset((dict, list, tuple))
_LARGEST = 64

#: What transformers' ``save_pretrained`` writes into the configuration of what it saves: it tells of the weights.
_OF_CHECKPOINTS = frozenset(("architectures", "dtype", "torch_dtype", "transformers_version"))

#: What torch itself reads of a module to call it.
_OF_TORCH = frozenset((*dir(nn.Module), *vars(nn.Module()))) - {"training", "forward"}

#: Dictionaries of hooks that run with a module, by their keys in ``vars(module)``.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reads:
    """Attributes of ``model``'s modules that are read while `noted`: plain values, functions, and configurations.

    ``names``: for each module, by its id, the names of its attributes that were read.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.names: dict[int, set[str]] = defaultdict(set)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what any module reads of itself, and what is read of it, inside."""
        read, names, outer = object.__getattribute__, self.names, nn.Module.__dict__.get("__getattribute__")

        def noting(module: nn.Module, name: str) -> Any:
            value = read(module, name)
            if name not in _OF_TORCH and _is_constant(name, value, read(module, "__dict__")):
                names[id(module)].add(name)
            return value

        nn.Module.__getattribute__ = noting
        try:
            yield
        finally:
            if outer is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = outer


def _is_constant(name: str, value: Any, held: dict) -> bool:
    """Whether a graph is specialized on what was read. Of methods: ``forward``, and those given to the module itself,
    which ``held`` has."""
    if type(value) is MethodType:
        return name == "forward" or name in held
    return type(value) in _READ or _is_plain_container(value) or _is_configuration(name, value)


def _is_plain_container(value: Any) -> bool:
    """A container of plain values, as the scales of LoRA by the names of adapters."""
    if type(value) not in _CONTAINERS or len(value) > _LARGEST:
        return False
    return all(type(item) in _TYPES for item in (value.values() if type(value) is dict else value))


def _is_configuration(name: str, value: Any) -> bool:
    """A record of options, shared by the modules of a model: whatever it holds may be read."""
    return (name in ("config", "cfg") and hasattr(value, "__dict__")) or _is_record(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(type(value)) and hasattr(value, "__dict__")


class Plain:
    """The plain values, functions, submodules and hooks that a captured step was specialized on."""

    def __init__(self, reads: Reads):
        model = self._model = reads.model
        self._dicts: list[dict] = []
        self._keys: list[str] = []
        self._paths: list[str] = []
        self._note(reads)
        self._values = list(map(dict.get, self._dicts, self._keys))
        self._containers = _containers(self._values)
        self._copies = list(map(copy.copy, self._containers))
        self._children = [m._modules for m in model.modules() if m._modules]
        self._held = [dict(children) for children in self._children]
        self._handles = RemovableHandle.next_id
        self._hooks = [(path, vars(m)[kind]) for path, m in model.named_modules() for kind in _HOOKS]
        self._hooks += [("every module", hooks) for hooks in compat.hooks_of_every_module()]
        self._hooked = [(path, hooks, list(hooks)) for path, hooks in self._hooks if hooks]

    def _note(self, reads: Reads) -> None:
        seen: set[int] = set()
        for path, module in reads.model.named_modules():
            held, prefix = vars(module), f"{path}." if path else ""
            for name in sorted(reads.names.get(id(module), ())):
                value = held.get(name)
                # None: its class has it, and the module itself may.
                if type(value) in _READ or _is_plain_container(value):
                    self._add(held, name, prefix)
                elif id(value) not in seen and _is_configuration(name, value):
                    seen.add(id(value))
                    told = _OF_CHECKPOINTS if "architectures" in vars(value) else ()
                    for key, option in vars(value).items():
                        if key not in told and (type(option) in _TYPES or _is_plain_container(option)):
                            self._add(vars(value), key, f"{prefix}{name}.")

    def _add(self, held: dict, name: str, prefix: str) -> None:
        self._dicts.append(held)
        self._keys.append(name)
        self._paths.append(prefix + name)

    def change(self) -> str | None:
        """What has changed since, in words; None if nothing has."""
        if not all(map(is_, map(dict.get, self._dicts, self._keys), self._values)):
            change = self._changed_value()
            if change:
                return change
        if not all(map(eq, self._containers, self._copies)):
            paths = [p for p, value in zip(self._paths, self._values, strict=True) if type(value) in _CONTAINERS]
            pairs = zip(paths, self._copies, self._containers, strict=True)
            return next(f"{path} changed from {old} to {new}" for path, old, new in pairs if old != new)
        if self._children != self._held:
            return "submodules were replaced"
        if self._hooked or RemovableHandle.next_id != self._handles:
            return self._changed_hooks()
        return None

    def _changed_value(self) -> str | None:
        now = list(map(dict.get, self._dicts, self._keys))
        for path, old, new in zip(self._paths, self._values, now, strict=True):
            if old is not new and not (type(old) is type(new) and (old == new or repr(old) == repr(new) == "nan")):
                return f"{path} changed from {_short(old)} to {_short(new)}"
        self._values, self._containers = now, _containers(now)  # the same values in other objects
        return None

    def _changed_hooks(self) -> str | None:
        for path, hooks, keys in self._hooked:
            if list(hooks) != keys:
                return f"hooks of {path or 'the model'} were added or removed"
        if RemovableHandle.next_id != self._handles:
            hooked = {id(hooks) for _, hooks, _ in self._hooked}
            for path, hooks in self._hooks:
                if hooks and id(hooks) not in hooked:
                    return f"hooks of {path or 'the model'} were added"
            for name, parameter in self._model.named_parameters():
                if compat.has_gradient_hooks(parameter):
                    return f"a gradient hook of parameter {name} was added"
            self._handles = RemovableHandle.next_id  # hooks of something else
        return None


def _containers(values: list) -> list:
    return [value for value in values if type(value) in _CONTAINERS]


def _short(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)

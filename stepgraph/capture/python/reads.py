"""Python reads during a trace: the objects met, and the attributes read.

What a graph is specialized on is found where it is read: during the trace, every class of an object that it may
reach notes the reads of its attributes. The trace begins at the model and the loss function; what a read gives, what a
container holds, and what the code of a function names is met in turn.

At its end, what the trace changed there is restored, and `Reads.changes` says what that was.

This module also answers what ``type(tensor)`` is in eager: the tensors of a trace have another class.

The user's functions find ``type`` among Python's builtins. While they are traced, modules whose functions name it have
a class of that name, which answers for a fake tensor as eager would and is Python's for all else.
"""

import builtins
import contextlib
import contextvars
import ctypes
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from stepgraph import compat
from stepgraph.capture.python import parts, values
from stepgraph.capture.python.host_random import ENTROPY, HostRandom
from stepgraph.capture.python.imports import around_imports
from stepgraph.capture.python.torch_random import GeneratorCalls
from stepgraph.capture.python.values import ABSENT, counted_module, is_of_program, kind_of, of_program
from stepgraph.capture.python.watched import HOOKS, LOSS, Watched, _Walk


def type_of(value: Any) -> type:
    """``type(value)`` as in eager, and `TYPE` for ``type``."""
    found = type(value)
    if found is compat.FakeTensor:
        return compat.class_in_eager(value)
    if found is torch.SymInt:  # a size that the trace leaves open
        return int
    return TYPE if found is type else found


class _AsEager(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type_of(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type)

    def __eq__(cls, other: Any) -> bool:
        return other is type or other is TYPE

    __hash__ = type.__hash__


class TYPE(type, metaclass=_AsEager):
    """What ``type`` is in these modules."""


TYPE.__name__ = TYPE.__qualname__ = "type"
TYPE.__module__ = "builtins"


class TensorTypes:
    """The modules of the functions that a trace meets, by the names in their code."""

    def __init__(self) -> None:
        self.of_packages = False  # whether functions of packages get it too
        self._found: list[dict[str, Any]] = []
        self._put: list[dict[str, Any]] | None = None

    def add(self, function: FunctionType) -> None:
        """A function that may run in the trace."""
        held = function.__globals__
        counts = self.of_packages or is_of_program(function.__code__.co_filename)
        if counts and "type" in parts.globals_named(function):
            self._found.append(held)
            self._replace(held)

    def _replace(self, held: dict[str, Any]) -> None:
        own = held.get("__builtins__")
        if self._put is not None and "type" not in held and own in (builtins, vars(builtins)):
            held["type"] = TYPE
            self._put.append(held)

    @contextlib.contextmanager
    def as_eager(self) -> Iterator[None]:
        """Inside, these modules have eager's answers."""
        self._put = []
        try:
            for held in self._found:
                self._replace(held)
            yield
        finally:
            for held in self._put:
                held.pop("type", None)
            self._put = None


class Change(NamedTuple):
    """What a trace left in ``holder`` under ``key``, an attribute, an item, or None for all of a container."""

    where: str
    holder: Any
    key: Any
    old: Any
    new: Any
    of_model: bool

    def put(self, value: Any) -> None:
        if self.key is None:
            _refill(self.holder, value)
        elif isinstance(self.holder, contextvars.ContextVar):
            if value is not ABSENT:  # a value cannot be unset
                self.holder.set(value)
        elif isinstance(self.holder, (dict, os._Environ)):
            self.holder.pop(self.key, None) if value is ABSENT else self.holder.__setitem__(self.key, value)
        elif value is ABSENT:
            if not isinstance(self.holder, type):
                object.__delattr__(self.holder, self.key)
            elif self.key in vars(self.holder):  # it may be noted for a class and for its subclass
                delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, value)


class Reads:
    """What is read while `noted`. ``others``: what else runs in a step, by what to call it. ``names``: for each object,
    by its id, the names of its attributes that were read."""

    def __init__(self, model: nn.Module, loss_fn: Callable, others: Mapping[str, Callable] | None = None):
        self.model, self.roots = model, {LOSS: loss_fn} | dict(others or {})
        self.names: dict[int, set[str]] = defaultdict(set)
        self._met: dict[int, Any] = {}
        #: (id of a holder, key): where it is, the holder, the key, the value.
        self._before: dict[tuple[int, Any], tuple[str, Any, Any, Any]] = {}
        self._whole: dict[int, tuple[str, Any, list]] = {}
        #: The keys that the dictionary of a torch or Python module had before the trace, by its id.
        self._keys: dict[int, set[str]] = {}
        #: Arrays and context variables, by id: the path, the object, its value before the trace.
        self._values: dict[int, tuple[str, Any, Any]] = {}
        self._caches: list[tuple[Any, int]] = []
        self._noting: dict[type, Any] = {}
        self._named: set[str] = set()
        self._of_model = {id(vars(module)) for module in model.modules()}
        plain = [(path, t) for path, t in (*model.named_parameters(), *model.named_buffers()) if type(t) in _PLAIN]
        self._on_tensors = [(f"{path}.{name}", value) for path, t in plain for name, value in vars(t).items()]
        self._is_noted, self._found = False, []
        self.random = HostRandom(model)
        self.read: list[torch.Tensor] = []  # tensors from outside the step whose values Python read
        self.types, self.generators = TensorTypes(), GeneratorCalls()
        self._environment: set[str | None] = set()  # None: all of it
        self._classes: dict[type, None] = {}
        self._modules: dict[int, ModuleType] = {}  # Python modules that code names values of
        self._looked_for: set[str] = set()  # names that were searched in all of them
        # These read memory: no operator is called. One of each for all traces of a step: it may be met itself.
        self._of_memory = {name: self._seeing_memory(name) for name in ("tolist", "numpy", "__dlpack__", "data_ptr")}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record what is read inside. Changes to other objects than the model are undone."""
        self._is_noted, self._thread = True, threading.get_ident()
        self._variables = dict(os.environ)
        environment = type(os.environ)
        variable, names, size = environment.__getitem__, environment.__iter__, environment.__len__
        environment.__getitem__ = lambda environ, name: self._see_variable(lambda e: variable(e, name), environ, name)
        environment.__iter__ = lambda environ: self._see_variable(names, environ, None)
        environment.__len__ = lambda environ: self._see_variable(size, environ, None)
        inside = contextlib.ExitStack()
        inside.enter_context(compat.replaced(torch.Tensor, **self._of_memory))
        inside.enter_context(compat.shown_tensors(self.read.append))
        inside.enter_context(ENTROPY.counted(is_of_program))
        inside.enter_context(compat.replaced(values.NotedModule, seen=self._see_of_module))
        inside.enter_context(around_imports(self._imported))
        try:
            for cls in (nn.Module, *self._classes):
                self._note_class(cls)
            for module in self._modules.values():
                self._note_module(module)
            for path, module in self.model.named_modules():
                self._met[id(module)] = module
                own = {key: value for key, value in vars(module).items() if not parts.is_torchs(module, key)}
                self._keep_dict(path, vars(module), own)
                self._keys[id(vars(module))] = set(vars(module))
                self._whole.setdefault(id(vars(module)), (path, vars(module), None))
                for held in parts_registered(vars(module)):  # they hold the trace's tensors inside, and only there
                    self._met[id(held)] = held
                self._keep_hooks(path or "the model", module)
            for cls in dict.fromkeys(map(type, self.model.modules())):
                self._meet("", cls)
            hooked = [(path, vars(module)[hooks]) for path, module in self.model.named_modules() for hooks in HOOKS]
            for path, hooks in (*hooked, *(("", hooks) for hooks in compat.hooks_of_every_module())):
                for hook in hooks.values():
                    self._meet(path, hook)
            for path, root in (*self._on_tensors, *self.roots.items()):
                self._meet(path, root)
            yield
        finally:
            with inside:  # what it replaces in torch.Tensor, which may be met, is not a change
                self._is_noted = False
                environment.__getitem__, environment.__iter__, environment.__len__ = variable, names, size
                for module in self._modules.values():
                    if type(module) is values.NotedModule:
                        module.__class__ = ModuleType
                for cls, before in self._noting.items():
                    if before is None:
                        del cls.__getattribute__
                    else:
                        cls.__getattribute__ = before
                self._noting.clear()
                self._found += self._changes()
                for change in self._found:
                    if not change.of_model or change.key is None:
                        change.put(change.old)
                for cache, size in self._caches:
                    if cache.cache_info().currsize > size:  # what it holds may be of the trace
                        cache.cache_clear()

    def module_with(self, of: Any) -> tuple[str, nn.Module] | None:
        """The outermost module outside the model that holds ``of``, a tensor or a dictionary, and its path."""
        own = set(map(id, self.model.modules()))
        met = (one for one in self._met.values() if isinstance(one, nn.Module) and id(one) not in own)
        found = (one for one in met if any(map(partial(_holds, of), one.modules())))
        outermost = max(found, key=lambda one: len(list(one.modules())), default=None)
        return None if outermost is None else (self._whole[id(vars(outermost))][0], outermost)

    def changes(self) -> list[Change]:
        """What the trace has changed in objects that it met; only attributes that were read count."""
        return self._changes() if self._is_noted else self._found

    def watched(self, moving: Sequence[Change] = ()) -> Watched:
        """What was read, to be compared from now on, except for what is ``moving``: the graph does not depend on it."""
        by_path: dict[str, list[str]] = {}
        whole = {id(change.holder) for change in moving if change.key is None}
        keys = {(id(change.holder), change.key) for change in moving}
        skipped: set[str] = set()

        def is_moving(path: str, value: Any) -> bool:
            if id(value) in whole:
                skipped.add(path)
            return path in skipped

        def names_of(path: str, value: Any) -> list[str] | None:
            if kind_of(type(value)) == "instance" and self._classes.keys().isdisjoint(type(value).__mro__):
                return None  # all of it
            found = sorted(self.names[id(value)]) if id(value) in self.names else None
            if found is not None and keys:
                holders = id(value), id(values.held_by(value))
                found = [name for name in found if not any((holder, name) in keys for holder in holders)]
            if found is None and kind_of(type(value)) == "instance":
                found = []
            if found is not None:
                by_path[path] = found
            return found

        _Walk(self.model, self.roots, names_of, is_moving)
        return Watched(self.model, self.roots, by_path, self._environment, self.read, skipped)

    # ---- reads ----

    def _is_seen(self, cls: type) -> bool:
        return bool(cls.__flags__ & 1 << 9) and cls not in _UNCHANGEABLE

    def _note_class(self, cls: type) -> None:
        """Let a class note reads of its objects' attributes; one of C that cannot is looked at whole."""
        if cls in self._noting or not self._is_seen(cls):
            return
        inner, before = cls.__getattribute__, vars(cls).get("__getattribute__")
        read, seen, names = object.__getattribute__, self._see, self.names
        of_modules = cls is nn.Module

        def noting(owner: Any, name: str) -> Any:
            try:
                value = inner(owner, name)
            except AttributeError:
                if not (of_modules and any(name in d for d in parts_registered(read(owner, "__dict__")))):
                    names[id(owner)].add(name)
                raise
            seen(owner, name, value, of_modules)
            return value

        try:
            cls.__getattribute__ = noting
        except TypeError:
            _UNCHANGEABLE.add(cls)
        else:
            self._noting[cls] = before
            self._classes[cls] = None

    def _note_module(self, module: ModuleType) -> None:
        """Record reads of what a Python module of the user's holds."""
        if type(module) is ModuleType and of_program(module.__name__):
            module.__class__ = values.NotedModule

    def _see(self, owner: Any, name: str, value: Any, of_modules: bool) -> None:
        name = "__dict__" if name == "__getstate__" else name  # copies and pickle read it below attributes
        if of_modules and name == "__dict__":
            frame = sys._getframe(2)
            of_torch = not is_of_program(frame.f_code.co_filename)
        else:
            of_torch = of_modules and (name in parts.OF_TORCH or parts.is_torchs(owner, name))
        if of_torch or (name.startswith("__") and name != "__dict__"):
            self.names[id(owner)]
            return
        self.names[id(owner)].add(name)
        if of_modules and name == "__dict__":
            return
        if id(owner) in self._met and kind_of(type(value)) != "atom":
            own = type(value) is MethodType and value.__self__ is owner
            self._meet(f"{type(owner).__name__}.{name}", value.__func__ if own else value)

    def _see_of_module(self, module: ModuleType, name: str, value: Any) -> None:
        """A name of a user's module, which code may compute."""
        if not (name.startswith("__") and name.endswith("__")):
            self.names[id(module)].add(name)
            if (id(vars(module)), name) not in self._before:
                self._note([*parts.parts_of_namespace(module, [name])], "", pending := deque())
                self._meet_all(pending)

    def _see_variable(self, read: Callable, environ: os._Environ, name: str | bytes | None) -> Any:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen"):  # os.getenv and the like
            frame = frame.f_back
        if is_of_program(frame.f_code.co_filename):
            self._environment.add(name and os.fsdecode(name))  # those of os.environb are bytes
        return read(environ)

    def _seeing_memory(self, name: str) -> Callable:
        read = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_noted or compat.is_fake(tensor) or threading.get_ident() != self._thread:
                return read(tensor, *args, **kwargs)
            self.read.append(tensor)
            with compat.without_modes():
                return read(tensor, *args, **kwargs)

        return call

    # ---- what is met ----

    def _meet(self, path: str, value: Any) -> None:
        self._meet_all(deque([(path, value)]))

    def _meet_all(self, pending: deque[tuple[str, Any]]) -> None:
        while pending or len(self._looked_for) != len(self._named):
            if not pending:  # code that was met since names more of the modules
                new = self._named - self._looked_for
                self._looked_for |= new
                for module in self._modules.values():
                    self._note([*parts.parts_of_namespace(module, new)], "", pending)
                continue
            path, value = pending.popleft()
            kind = kind_of(type(value))
            if kind == "atom" and values.has_more(type(value)):
                kind = "plain object"
            if kind in ("atom", "tensor", "buffer", "opaque", "moving") or id(value) in self._met or value is ABSENT:
                self.random.add(path.removesuffix(".__self__"), value)
                if isinstance(value, torch.Generator):
                    self.generators.meet()
                if kind == "buffer" and not values.holds_objects(value) and values.size_of(value) <= values.LARGEST:
                    self._values.setdefault(id(value), (path, value, _copy(value)))
                continue
            self._met[id(value)] = value
            if kind == "module":
                for held in (vars(value), *parts_registered(vars(value))):
                    self._keep_dict(path, held)
                self._keep_hooks(path, value)
                pending.append(("", type(value)))
                pending.extend((path, hook) for hooks in HOOKS for hook in vars(value)[hooks].values())
                continue
            if kind == "instance":
                self._note_class(type(value))
                held = values.held_by(value)
                if held is not None:
                    self._keep_dict(path, held)
                for name in values.slots_of(type(value)):
                    now = values.in_slot(value, name)
                    self._before.setdefault((id(value), name), (f"{path}.{name}", value, name, now))
                found = parts.parts_of_instance(value, None) if not self._is_seen(type(value)) else ()
                found = [*found, *self._of_class(type(value))]
            elif kind == "plain object":
                if (held := values.held_by(value)) is not None:
                    self._keep_dict(path, held)
                found = [*parts.parts_of_instance(value, None), *self._of_class(type(value))]
            elif kind == "container":
                if len(value) > values.LARGEST:
                    continue
                if not isinstance(value, (tuple, frozenset)) and hasattr(value, "clear"):
                    self._whole[id(value)] = (path, value, _content(value))
                found = [*parts.plain_parts(value), *self._of_class(type(value))]
            elif kind == "cached":
                self._caches.append((value, value.cache_info().currsize))
                found = list(parts.plain_parts(value))
            elif kind == "class":
                if kind_of(value) == "instance" and of_program(value):
                    self._note_class(value)  # the trace may make objects of it
                found = [*self._of_class(value), *self._of_class(type(value))]
            elif kind == "namespace":
                self._keys.setdefault(id(vars(value)), set(vars(value)))
                self._modules[id(value)] = value
                self._note_module(value)
                found = list(parts.parts_of_namespace(value, self._named))
            else:
                if isinstance(value, contextvars.ContextVar):
                    self._values[id(value)] = (f"{path}()", value, value.get(ABSENT))
                if kind == "function":
                    if is_of_program(value.__code__.co_filename):
                        self._keep_dict(path, vars(value))
                    self._named |= (named := parts.attributes_named(value))
                    self.types.add(value)
                    if "default_generator" in named:
                        self.generators.meet()
                found = list(parts.plain_parts(value))
            self._note(found, path, pending)

    def _note(self, found: Iterable[parts.Part], path: str, pending: deque[tuple[str, Any]]) -> None:
        """Record the current value of each part, and append those to be searched in turn to ``pending``."""
        for part in found:
            if part.value is TYPE:  # put there by the trace
                continue
            where = part.name if part.absolute else path + part.name
            inside = values.behind(part.value)
            if part.how != "content" and part.key != "__defaults__":
                self._before.setdefault((id(part.holder), part.key), (where, part.holder, part.key, inside))
            if parts.is_looked_into(part):
                pending.append((where, inside))

    def _of_class(self, cls: type) -> list[parts.Part]:
        """What a class of the user's has: its values, and methods whose code names what may be read."""
        return list(parts.parts_of_class(cls, lambda *_: True)) if of_program(cls) else []

    def _keep_hooks(self, where: str, module: nn.Module) -> None:
        """Keep the hooks of ``module``: forward may add some in its first call, and note that it has."""
        for held in (vars(module)[hooks] for hooks in HOOKS):
            self._whole.setdefault(id(held), (f"the hooks of {where}", held, _content(held)))

    def _keep_dict(self, where: str, held: dict, watched: dict | None = None) -> None:
        """Keep what ``held`` holds; ``watched``: the part of it that counts, all by default."""
        for key, value in (held if watched is None else watched).items():
            self._before.setdefault((id(held), key), (f"{where}.{key}" if where else key, held, key, value))
        if watched is None or len(watched) == len(held):
            self._whole.setdefault(id(held), (where, held, None))

    # ---- what has changed ----

    def _changes(self) -> list[Change]:
        owners = {id(vars(m)): id(m) for m in self.model.modules()}
        for value in self._met.values():
            if (held := values.held_by(value)) is not None:
                owners[id(held)] = id(value)
        found = []
        for (holder_id, _), (where, holder, key, old) in self._before.items():
            if isinstance(holder, type):
                new = vars(holder).get(key, ABSENT)
            elif key in values.slots_of(type(holder)):
                new = values.in_slot(holder, key)
            else:
                new = dict.get(holder, key, ABSENT) if isinstance(holder, dict) else getattr(holder, key, ABSENT)
            if new is not old and not _same(old, new):
                found.append(Change(where, holder, key, old, new, holder_id in self._of_model))
        for cls in [cls for cls in self._met.values() if isinstance(cls, type) and of_program(cls)]:
            for key in [k for k in vars(cls) if (id(cls), k) not in self._before and not k.startswith("__")]:
                if not values.is_slot(new := vars(cls)[key]):
                    found.append(Change(f"{cls.__module__}.{cls.__qualname__}.{key}", cls, key, ABSENT, new, False))
        own = {id(value) for module in self.model.modules() for value in vars(module).values()}
        hooks = {id(vars(module)[kind]) for module in self.model.modules() for kind in HOOKS}
        for holder_id, (where, holder, before) in self._whole.items():
            if before is None:
                known = self._keys.get(holder_id, ())
                for key in [key for key in holder if (holder_id, key) not in self._before and key not in known]:
                    owner = self._met.get(owners.get(holder_id, 0))
                    if key.startswith("_torchdynamo") or (isinstance(owner, nn.Module) and parts.is_torchs(owner, key)):
                        continue
                    place = f"{where}.{key}" if where else key
                    found.append(Change(place, holder, key, ABSENT, holder[key], holder_id in self._of_model))
            elif not _same_content(before, now := _content(holder)):
                of_model = holder_id in hooks or (holder_id in own and values.fake_inside(now))
                found.append(Change(where, holder, None, before, now, of_model))
        for where, holder, before in self._values.values():
            now = holder.get(ABSENT) if isinstance(holder, contextvars.ContextVar) else _copy(holder)
            if not _same(before, now):
                key = "value" if isinstance(holder, contextvars.ContextVar) else None
                found.append(Change(where, holder, key, before, now, False))
        read = self._environment
        for name in sorted(os.environ.keys() | self._variables.keys() if None in read else filter(None, read)):
            old, new = self._variables.get(name, ABSENT), os.environ.get(name, ABSENT)
            if old is not new and old != new:
                found.append(Change(f"os.environ[{name!r}]", os.environ, name, old, new, False))
        for module in [value for value in self._met.values() if kind_of(type(value)) == "namespace"]:
            for key in sorted(self._named & vars(module).keys() - self._keys.get(id(vars(module)), set())):
                if kind_of(type(new := vars(module)[key])) not in values.CODE and counted_module(module):
                    found.append(Change(f"{module.__name__}.{key}", vars(module), key, ABSENT, new, False))
        # What torch.autocast keeps between __enter__ and __exit__, of an object that is entered again and again.
        own = {id(vars(value)) for value in list(self._met.values()) if issubclass(type(value), torch.autocast)}
        found = [change for change in found if id(change.holder) not in own or not str(change.key).startswith("prev")]
        return [change for change in found if change.key is None or not self._is_unread(change, owners)]

    @contextlib.contextmanager
    def _imported(self) -> Iterator[None]:
        """What the code inside, of a module that is imported, leaves in what was met was there before the trace."""
        before = {(id(change.holder), change.key) for change in self._changes()}
        try:
            yield
        finally:
            for where, holder, key, _, new, _ in self._changes():
                place = id(holder), key
                if place in before:
                    continue
                if isinstance(holder, os._Environ):
                    self._variables[key] = new
                elif place[0] in self._values:
                    self._values[place[0]] = where, holder, new
                elif key is None:
                    self._whole[place[0]] = where, holder, new
                else:
                    self._before[place] = where, holder, key, new
                    self._keys.get(place[0], set()).add(key)

    def _is_unread(self, change: Change, owners: dict[int, int]) -> bool:
        """Whether an attribute of the model was only written: a captured step leaves it."""
        read = self.names.get(owners.get(id(change.holder), 0), ())
        return change.of_model and change.key not in read and "__dict__" not in read


_UNCHANGEABLE: set[type] = set()
_PLAIN = (torch.Tensor, nn.Parameter)


def parts_registered(held: dict) -> tuple[dict, ...]:
    """The dictionaries of parameters, buffers and submodules among the attributes of a module."""
    return tuple(held.get(name, {}) for name in ("_parameters", "_buffers", "_modules"))


def _holds(of: Any, module: nn.Module) -> bool:
    parameters, buffers, _ = registered = parts_registered(vars(module))
    return any(one is of for one in (vars(module), *registered, *parameters.values(), *buffers.values()))


def _content(container: Any) -> Any:
    held = values.elements(container)  # what its class gives out may be another thing
    return dict(zip(held, held[len(container) :], strict=False)) if isinstance(container, dict) else held


def _same_content(before: Any, now: Any) -> bool:
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        return list(before) == list(now) and all(map(_same, before.values(), now.values()))
    return all(map(_same, before, now))


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    kind = kind_of(type(old))
    if kind == "buffer":
        return kind_of(type(new)) == "buffer" and values.content(old) == values.content(new)
    return kind == "atom" and values.equal(old, new)


def _copy(buffer: Any) -> Any:
    """A copy of an array that holds no objects."""
    if isinstance(buffer, memoryview):
        return memoryview(bytes(buffer))
    is_c = isinstance(buffer, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure))
    return type(buffer).from_buffer_copy(buffer) if is_c else buffer.copy() if hasattr(buffer, "copy") else buffer[:]


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)):
        ctypes.memmove(ctypes.addressof(container), ctypes.addressof(content), ctypes.sizeof(container))
        return
    if kind_of(type(container)) == "buffer":
        container[... if isinstance(container, np.ndarray) else slice(None)] = content
        return
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)

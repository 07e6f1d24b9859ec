"""Compares, at each call, what a captured step was specialized on in Python.

Every value is listed by its path from the model, the loss function or a global. Before each call the places are read
again and compared by identity, in loops of the interpreter itself. Only where one differs are all paths walked again
and values compared: equal values in other objects are not a change.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, repeat
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stepgraph import compat
from stepgraph.capture.python import parts, values
from stepgraph.capture.python.parts import Part
from stepgraph.capture.python.values import ABSENT, is_of_program, kind_of, of_program

#: Methods that autograd calls, which no code names.
_BY_AUTOGRAD = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
#: Dictionaries of hooks that run with a module, by their keys in ``vars(module)``.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: How a hook is called, by its key there.
_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
#: transformers' hook for checkpointing, which sets ``requires_grad``: to run it twice is to run it once.
_ONCE = "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"

#: What transformers' ``save_pretrained`` writes into the saved model's configuration: it describes the weights.
_OF_CHECKPOINTS = frozenset(("architectures", "dtype", "torch_dtype", "transformers_version"))

#: The path of the loss function; what it holds continues it.
LOSS = "loss_fn"


class _Walk:
    """Every value that was read, by its path, and the places to read it at again.

    ``names_of(path, value)``: what was read of an object, None for one whose reads were not seen.
    ``is_moving(path, container)``: whether the content of a container does not count.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Mapping[str, Any],
        names_of: Callable[[str, Any], Iterable[str] | None],
        is_moving: Callable[[str, Any], bool],
    ):
        self.names_of, self.is_moving = names_of, is_moving
        self.found: dict[str, tuple[str, Any]] = {}
        self.unseen: dict[str, str] = {}
        self.outside: dict[str, nn.Module] = {}
        self.items: list[tuple[dict, str, Any]] = []
        self.attributes: list[tuple[Any, str, Any]] = []
        self.contents: list[tuple[Any, list]] = []
        self.buffers: list[tuple[Any, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self._paths: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no other object has the id of one
        self._placed: set[tuple[int, str]] = set()
        self._named: set[str] = set()  # attributes that code names
        self._of_class: dict[type, set[str]] = {}
        self._open: dict[int, tuple[Any, Iterable[str]]] = {}  # Python modules, and names that were read of them
        self._attributed: list[tuple[str, dict[str, Any]]] = []  # what users have put on tensors
        self._pending: deque[tuple[str, Any]] = deque()
        own = {id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())}
        for path, module in model.named_modules():
            self._paths[id(module)] = path or "the model"
        self._own = own - {id(None)}
        for path, module in model.named_modules():
            self._module(path, module, f"model:{path}")
            where = f"{path}." if path else ""
            for name, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    self._note_attributes(where + name, tensor)
            for hooks in HOOKS:
                self._parts(where + hooks, _parts_of_hooks(module, hooks))
        for hooks in compat.hooks_of_every_module():
            self._parts("hooks of every module", parts.parts_of_container(hooks))
        self._pending.extend(roots.items())
        self._run()

    def _run(self) -> None:
        seen: tuple = ()
        while True:
            while self._pending:
                self._visit(*self._pending.popleft())
            names = sum(map(len, self._of_class.values()))
            now = (len(self._named), len(self._open), len(self._of_class), names)
            if now == seen:
                return
            seen = now
            for value, names in list(self._open.values()):
                self._parts("", parts.parts_of_namespace(value, self._named.union(names)))
                self._parts("", parts.functions_of_library(value, self._named))
            for path, held in self._attributed:
                named = [name for name in held if name in self._named]
                self._parts(path, (Part(f".{name}", held[name], "item", held, name) for name in named))
            for cls, names in list(self._of_class.items()):
                self._parts("", parts.parts_of_class(cls, partial(self._may_be_read, cls, names)))
                self._parts("", parts.shadows_of_class(cls, names))

    def _may_be_read(self, cls: type, names: set[str], name: str, value: Any) -> bool:
        """Whether what a class has under ``name`` may be read: it was, or it is of the user's and code names it."""
        if name in names:
            return True
        called = _is_special(name) or (name in _BY_AUTOGRAD and issubclass(cls, torch.autograd.Function))
        called = called and kind_of(type(value)) in ("function", "descriptor")
        return (called or name in self._named) and of_program(cls)

    def _parts(self, path: str, found: Iterable[Part]) -> None:
        for part in found:
            where = part.name if part.absolute else path + part.name
            if part.how != "content" and not self._place(part):
                continue
            if part.how == "attribute" or parts.is_looked_into(part):
                self._pending.append((where.removeprefix("."), part.value))
            elif where not in self.found:
                self.found[where] = ("is", part.value)

    def _place(self, part: Part) -> bool:
        """Note the place of a part; whether it is a new one."""
        key = id(part.holder), part.key
        new = key not in self._placed
        if part.how == "item":
            if new:
                self.items.append((part.holder, part.key, part.holder.get(part.key, ABSENT)))
        elif part.how == "class":
            if new:
                self.items.append((vars(part.holder), part.key, part.value))
        elif part.key == "__defaults__":  # one place for several values
            if new:
                self.attributes.append((part.holder, part.key, part.holder.__defaults__))
            self._placed.add(key)
            self._kept.append(part.holder)
            return True
        elif new:
            value = getattr(part.holder, part.key, ABSENT)
            if getattr(part.holder, part.key, ABSENT) is value:  # else it is computed at each read
                self.attributes.append((part.holder, part.key, value))
        self._placed.add(key)
        self._kept.append(part.holder)
        return new

    def _visit(self, path: str, value: Any) -> None:
        kind = kind_of(type(value))
        if kind == "atom" or value is ABSENT:
            self.found[path] = ("value", value)
            if values.has_more(type(value)) and self._paths.setdefault(id(value), path) == path:
                self._kept.append(value)
                self._all_of(path, value)
            return
        met = self._paths.setdefault(id(value), path)
        if met != path:
            self.found[path] = ("same", met)
            return
        if path in self.found:  # another object by one name, as two functions of a name
            path = f"{path} ({len(self.found)})"
        self._kept.append(value)
        match kind:
            case "tensor":
                self.found[path] = ("tensor", (value, *_form(value)) if id(value) not in self._own else (value,))
                if id(value) not in self._own:
                    self.tensors.append(value)
                    self._note_attributes(path, value)
            case "buffer":
                self._buffer(path, value)
            case "container":
                self._container(path, value)
            case "module":
                self._outside(path, value)
            case "instance":
                self.found[path] = ("is", value) if values.is_hidden(type(value)) else ("type", type(value))
                self._note_class(value)
                names = self.names_of(path, value)
                if names is not None and "architectures" in (values.held_by(value) or ()):
                    names = [name for name in names if name not in _OF_CHECKPOINTS]
                if names is None:
                    self._all_of(path, value)
                else:
                    held = values.held_by(value)
                    if "__dict__" in names and held is not None:  # what it may get later is read too
                        self.contents.append((held, values.elements(held)))
                    self._class(type(value), names)
                    self._parts(path, parts.parts_of_instance(value, names))
            case "function":
                self.found[path] = ("is", value.__code__)
                if is_of_program(value.__code__.co_filename):
                    self.contents.append((vars(value), values.elements(vars(value))))
                    for name in ("__code__", "__defaults__", "__kwdefaults__"):
                        self._place(Part("", None, "attribute", value, name))
                self._named |= parts.attributes_named(value)
                self._parts(path, parts.plain_parts(value))
            case "class":
                self.found[path] = ("is", value)
                self._class(value, ())
                self._class(type(value), ())
            case "reference":
                self.found[path] = ("type", type(value))
                self.contents.append((value, values.elements(value)))
                self._parts(path, parts.plain_parts(value))
            case "namespace":
                self.found[path] = ("is", value)
                self._open[id(value)] = value, self.names_of(path, value) or ()
                self._class(type(value), ())
            case "method" | "partial":
                self.found[path] = ("type", type(value))
                self._parts(f"{path}" if kind == "partial" else path + ".__func__", parts.plain_parts(value))
            case "moving":
                self.found[path] = ("is", value)
                self.unseen[path] = f"{type(value).__name__}, whose state nothing shows"
            case _:
                self.found[path] = ("is", value)
                self._parts(path, parts.plain_parts(value))

    def _all_of(self, path: str, value: Any) -> None:
        """Watch all that an object holds, and what may be added, as its reads were not seen."""
        held = values.held_by(value)
        if held is not None:
            self.contents.append((held, values.elements(held)))
        self._class(type(value), held or ())
        self._parts(path, parts.parts_of_instance(value, None))

    def _class(self, cls: type, names: Iterable[str]) -> None:
        if cls not in self._of_class and not cls.__flags__ & 1 << 8:
            path = f"{cls.__module__}.{cls.__qualname__}.__bases__"
            self.found[f"{path} ({len(self.found)})" if path in self.found else path] = ("value", cls.__mro__)
            self.attributes.append((cls, "__mro__", cls.__mro__))
        self._of_class.setdefault(cls, set()).update(names)

    def _note_class(self, value: Any) -> None:
        """Watch which class an object is of."""
        self.attributes.append((value, "__class__", value.__class__))

    def _note_attributes(self, path: str, tensor: torch.Tensor) -> None:
        """Watch attributes of a tensor that code names."""
        self._attributed.append((path, vars(tensor)))

    def on_tensors(self) -> list[dict[str, Any]]:
        """The attributes of each tensor, which users may add to."""
        return [held for _, held in self._attributed]

    def _buffer(self, path: str, value: Any) -> None:
        objects = values.holds_objects(value)
        if objects or values.size_of(value) > values.LARGEST:
            self.found[path] = ("is", value)
            what = "objects" if objects else f"{values.size_of(value):,} bytes"
            self.unseen[path] = f"{type(value).__name__} of {what}"
            return
        self.buffers.append((value, values.content(value)))
        self.found[path] = ("value", self.buffers[-1][1])

    def _container(self, path: str, value: Any) -> None:
        if self.is_moving(path, value):
            self.found[path] = ("is", value)
            return
        if len(value) > values.LARGEST:
            self.found[path] = ("is", value)
            self.unseen[path] = f"{type(value).__name__} of {len(value):,} elements"
            return
        if isinstance(value, defaultdict):
            self.attributes.append((value, "default_factory", value.default_factory))
        if not isinstance(value, (tuple, frozenset)):
            self.contents.append((value, values.elements(value)))
        if values.is_flat(value):
            self.found[path] = ("flat", (type(value), values.copied(value)))
            if isinstance(value, defaultdict):
                self._parts(path, [Part(".default_factory", value.default_factory)])
        else:
            labels = [part.name for part in parts.parts_of_container(value)]
            self.found[path] = ("elements", (type(value), labels))
            self._parts(path, parts.parts_of_container(value))
        if values.held_by(value) is not None:
            self._all_of(path, value)

    def _module(self, path: str, module: nn.Module, key: str) -> None:
        """What was read of a module of the model, or one outside of it."""
        names = [n for n in self.names_of(key, module) or () if not any(n in d for d in _registered(module))]
        self._class(type(module), names)
        self.found[f"{key}.__class__"] = ("is", type(module))
        self._note_class(module)
        held = vars(module)
        where = f"{path}." if path else ""
        if "__dict__" in names:  # the user's code reads it whole
            self.contents.append((held, values.elements(held)))
            own = [key for key in held if not (key in parts.OF_TORCH or parts.is_torchs(module, key))]
            names = [name for name in dict.fromkeys((*names, *own)) if name != "__dict__"]
        for name in names:
            part = Part(where + name, held.get(name, ABSENT), "item", held, name)
            self._parts("", [part])

    def _outside(self, path: str, module: nn.Module) -> None:
        """A module that is none of the model's: with its tensors, submodules and hooks."""
        self.found[path] = ("is", module)
        if self.names_of(path, module) is None:
            return
        self.outside[path] = module
        self._module(path, module, path)
        for kind, holder in zip(("parameters", "buffers", "submodules"), _registered(module), strict=True):
            self.found[f"{path}'s {kind}"] = ("value", tuple(holder))
            self.contents.append((holder, values.elements(holder)))
            self._parts(path, (Part(f".{name}", value) for name, value in holder.items()))
        for hooks in HOOKS:
            held = vars(module)[hooks]
            self.contents.append((held, values.elements(held)))
            self._parts(f"{path}.{hooks}", _parts_of_hooks(module, hooks))


def _parts_of_hooks(module: nn.Module, hooks: str) -> Iterator[Part]:
    """Hooks by their order: a hook that was removed and registered again has another key. Of equal ones of `_ONCE` next
    to each other, the first: TRL adds one in each step."""
    held, place, before = vars(module)[hooks], 0, None
    for key, hook in held.items():
        code = getattr(hook, "__code__", None)
        if code is None or code is not before or code.co_qualname != _ONCE:
            yield Part(f"[{place}]" + "".join(kind for kind in _OF_HOOKS if key in vars(module)[kind]), hook)
            place += 1
        before = code


def _registered(module: nn.Module) -> tuple[dict, dict, dict]:
    return module._parameters, module._buffers, module._modules


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in ("__dict__", "__weakref__", "__doc__")


def _form(tensor: torch.Tensor) -> tuple:
    place = 0
    if type(tensor) in (torch.Tensor, nn.Parameter) and not compat.is_fake(tensor) and tensor.layout is torch.strided:
        place = tensor.data_ptr()
    return place, tensor.requires_grad, tensor.dtype, tensor.device, tuple(tensor.shape)


class Watched:
    """What a step read of Python. ``names``: by paths of objects the names that were read of them. ``moving``: paths of
    containers whose content does not count.

    ``environment``: its variables, and ``read``: the tensors, whose values were read. ``unseen``: by paths what was
    read and can be compared neither by value nor by its state, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Mapping[str, Any],
        names: Mapping[str, Iterable[str]],
        environment: Iterable[str | None] = (),
        read: Iterable[torch.Tensor] = (),
        moving: Collection[str] = (),
    ):
        self.model, self.roots, self.names, self._moving = model, roots, names, moving
        self._environment = {name: _of_environment(name) for name in environment}
        self._read = [(tensor, values.content(tensor)) for tensor in read]
        self._walk = walk = self._walked()
        self.unseen = walk.unseen
        self._hooks = [(path, vars(m)[kind]) for path, m in model.named_modules() for kind in HOOKS]
        self._hooks += [("every module", hooks) for hooks in compat.hooks_of_every_module()]
        self._ready()
        self._children = [m._modules for m in model.modules()]
        self._submodules = _entries(self._children)
        registered = [(path, held) for path, m in model.named_modules() for held in (m._parameters, m._buffers)]
        self._owners = [path for path, _ in registered]
        self._registered = [held for _, held in registered]
        self._order = _names(self._registered)
        empty = [(held, name, path) for path, held in registered for name in held if held[name] is None]
        self._empty, self._empty_names, self._empty_paths = _columns(empty)
        self._settings = compat.settings()
        self._handles = RemovableHandle.next_id

    def _walked(self) -> _Walk:
        return _Walk(self.model, self.roots, lambda path, _: self.names.get(path), lambda path, _: path in self._moving)

    def _ready(self) -> None:
        walk = self._walk
        dicts = [one for one in walk.items if not isinstance(one[0], MappingProxyType)]
        proxies = [one for one in walk.items if isinstance(one[0], MappingProxyType)]
        self._dicts, self._keys, self._values = _columns(dicts)
        self._proxies, self._names, self._of_classes = _columns(proxies)
        self._objects, self._attributes, self._held = _columns(walk.attributes)
        self._containers = walk.contents
        self._buffers = walk.buffers
        self._tensors = walk.tensors
        self._forms = list(map(_form, self._tensors))
        self._on_tensors = walk.on_tensors()
        self._sizes = list(map(len, self._on_tensors))
        self._hooked = [(hooks, list(hooks)) for _, hooks in self._hooks if hooks]

    def change(self) -> str | None:
        """What has changed since, in words; None if nothing has."""
        if not self._are_the_same():
            now = self._walked()
            change = _difference(self._walk.found, now.found)
            if change:
                return change
            self._walk = now  # the same values in other objects
            self._ready()
        if _entries(self._children) != self._submodules:
            return "submodules were replaced"
        if (order := _names(self._registered)) != self._order:
            lists = zip(self._owners, _split(*order), _split(*self._order), strict=True)
            path = next(path for path, now, before in lists if now != before)
            return f"tensors of {path or 'the model'} were added, removed or put in another order"
        if not all(map(is_, map(dict.get, self._empty, self._empty_names), repeat(None))):
            places = zip(self._empty, self._empty_names, self._empty_paths, strict=True)
            name, path = next((name, path) for held, name, path in places if held.get(name) is not None)
            return f"{path + '.' if path else ''}{name} changed from None to a tensor"
        for name, before in self._environment.items():
            if (now := _of_environment(name)) != before:
                return (
                    "os.environ changed" if name is None else f"os.environ[{name!r}] changed from {before!r} to {now!r}"
                )
        for tensor, before in self._read:
            if values.content(tensor) != before:
                return f"a tensor of shape {list(tensor.shape)} changed whose value Python reads"
        if (settings := compat.settings()) != self._settings:
            name = next(name for name in settings if settings[name] != self._settings[name])
            return f"{name} changed from {self._settings[name]} to {settings[name]}"
        return self._added_hooks() if RemovableHandle.next_id != self._handles else None

    def from_now(self) -> Callable[[], str | None]:
        """Says later, in words, what has changed from now on; None for nothing."""

        def found() -> Mapping[str, tuple]:
            return self._walk.found if self.change() is None else self._walked().found

        before = found()
        return lambda: None if (now := found()) is before else _difference(before, now)

    def _are_the_same(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._dicts, self._keys, repeat(ABSENT)), self._values))
            and all(map(is_, map(MappingProxyType.get, self._proxies, self._names, repeat(ABSENT)), self._of_classes))
            and all(map(is_, map(getattr, self._objects, self._attributes, repeat(ABSENT)), self._held))
            and all(_holds(container, before) for container, before in self._containers)
            and all(values.content(buffer) == before for buffer, before in self._buffers)
            and list(map(_form, self._tensors)) == self._forms
            and list(map(len, self._on_tensors)) == self._sizes
            and all(list(hooks) == keys for hooks, keys in self._hooked)
        )

    def _added_hooks(self) -> str | None:
        hooked = {id(hooks) for hooks, _ in self._hooked}
        for path, hooks in self._hooks:
            if hooks and id(hooks) not in hooked:
                return f"hooks of {path or 'the model'} were added"
        for name, parameter in self.model.named_parameters():
            if compat.has_gradient_hooks(parameter):
                return f"a gradient hook of parameter {name} was added"
        self._handles = RemovableHandle.next_id  # the same hooks, or hooks of something else
        return None


def _of_environment(name: str | None) -> Any:
    """The variable of that name; of None all of them."""
    return dict(os.environ) if name is None else os.environ.get(name)


def _columns(rows: list[tuple]) -> tuple[list, list, list]:
    return tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [])


def _names(dicts: list[dict]) -> tuple[list[int], list[str]]:
    """The sizes of dictionaries, and all their keys in one list: a list for each would start garbage collections."""
    return list(map(len, dicts)), list(chain.from_iterable(dicts))


def _split(sizes: list[int], names: list[str]) -> Iterator[list[str]]:
    """The keys of each dictionary, of what `_names` returned."""
    rest = iter(names)
    return (list(islice(rest, size)) for size in sizes)


def _entries(dicts: list[dict]) -> tuple:
    return *_names(dicts), list(chain.from_iterable(map(dict.values, dicts)))


def _holds(container: Any, before: list) -> bool:
    now = values.elements(container)
    return len(now) == len(before) and all(map(is_, now, before))


def _difference(before: Mapping[str, tuple], now: Mapping[str, tuple]) -> str | None:
    """The first path whose value is another, in words."""
    for path, (tag, old) in before.items():
        tag_now, new = now.get(path, ("value", ABSENT))
        if tag == tag_now and _alike(tag, old, new):
            continue
        if old is ABSENT and tag == "value":
            return f"{path} changed from None to {_text(tag_now, new)}"
        if new is ABSENT:
            return f"{path} was deleted"
        return f"{path} changed from {_text(tag, old)} to {_text(tag_now, new)}"
    return next((f"{path} was added" for path in now if path not in before), None)


def _alike(tag: str, old: Any, new: Any) -> bool:
    if tag in ("value", "flat", "elements"):
        return values.equal(old, new) if tag == "value" else old[0] is new[0] and values.equal(old[1], new[1])
    if tag == "tensor":
        return old[0] is new[0] and old[1:] == new[1:]
    return old == new if tag == "same" else old is new


def _text(tag: str, value: Any) -> str:
    match tag:
        case "value":
            text = repr(value)
        case "flat":
            kind, items = value
            text = repr(tuple(items) if issubclass(kind, tuple) else items)
        case "is":
            names = (getattr(value, name, None) for name in ("__qualname__", "co_qualname"))
            text = next(filter(None, names), f"another {type(value).__name__}")
        case "tensor":
            text = f"a tensor at {value[1]:#x}" if len(value) > 1 else "a tensor"
        case "type":
            text = value.__qualname__
        case "elements":
            text = f"{value[0].__name__} of {len(value[1])}"
        case _:
            text = f"the same as {value}"
    return text if len(text) <= 100 else f"{text[:97]}..."

"""What has been put in the place of torch's own functions: code that a trace goes through."""

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from stepgraph.run.saved import key
from stepgraph.run.saved.reads.describe import Describer
from stepgraph.run.saved.reads.places import counts, origin

#: What models and losses call, and what torch calls for them.
_LOOKED_AT = ("torch.nn.", "torch.autograd", "torch.amp", "torch.distributed.tensor", "torch.optim")
_ONE_BY_ONE = ("torch", "torch.nn", "torch.functional", "torch._tensor", "torch.utils.checkpoint")
#: Those that ``import torch`` loads. In these torch's own functions, too, are told from one another.
_ALWAYS = ("torch", "torch.functional", "torch._tensor", "torch.nn.functional")
#: What Dynamo puts into ``nn.Module`` when it is first used; none runs with a model's forward.
_OF_DYNAMO = ("Module.__init__", "Module.__setstate__", "Module.___needs_generation_tag_patch")


def described_patches(open: dict[Any, Any]) -> dict[str, str]:
    """Name -> text of every function in torch's modules and classes that is of a file that is not torch's, and of what
    is callable in another way; and for each module that is always loaded a hash of what its names stand for. Raises
    `Indescribable`."""
    describe, found = Describer(open=open), {}
    for name, module in sorted(sys.modules.items()):
        if (name not in _ONE_BY_ONE and not name.startswith(_LOOKED_AT)) or not isinstance(module, types.ModuleType):
            continue
        own, always = {}, name in _ALWAYS or name.startswith("torch.nn.modules.")
        for at, value in _held(module):
            if _is_foreign(value) or (always and isinstance(value, functools.partial)):
                found[f"{name}.{at}"] = describe(value, f"{name}.{at}")
            elif always and at not in _OF_DYNAMO and (text := _name(value)):
                own[at] = text
        if own:
            found[name] = key.digest(own)
    return found


def _held(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module holds, and what its own classes do, by name."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for at, held in list(vars(value).items()):
                function = getattr(held, "__func__", held)  # of a static or class method
                yield f"{name}.{at}", function.fget if isinstance(function, property) else function
        elif not name.startswith("__"):
            yield name, value


def _is_foreign(value: Any) -> bool:
    """Whether it is a function, or an object that is called by one, of a file that is not torch's."""
    function = value if isinstance(value, types.FunctionType) else inspect.getattr_static(type(value), "__call__", None)
    if not isinstance(function, types.FunctionType):
        return False
    file = origin(function.__code__, function.__globals__)
    made = function.__globals__.get("__name__", "").startswith("namedtuple_") or file.endswith("typing_extensions.py")
    return counts(file) and not made  # by what makes torch's own


def _name(value: Any) -> str | None:
    """Of a function where it was made, of a plain value itself; None for what is neither."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) and callable(value) else None

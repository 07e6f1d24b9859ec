"""What other libraries have put in the place of torch's own functions: code of theirs, which a trace goes through."""

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from stepgraph.run.saved.describe import Describer
from stepgraph.run.saved.sources import counts

#: What models and losses call, and what torch calls for them.
_LOOKED_AT = ("torch.nn.", "torch.autograd", "torch.amp", "torch.distributed.tensor", "torch.optim")
_ONE_BY_ONE = ("torch", "torch.nn", "torch.functional", "torch._tensor", "torch.utils.checkpoint")


def described_patches() -> dict[str, str]:
    """Name -> text of every function in torch's modules and classes that is of a file that is not torch's. Raises
    `Indescribable`."""
    describe = Describer()
    return {name: describe(value, name) for name, value in sorted(_patches()) if name}


def _patches() -> Iterator[tuple[str, types.FunctionType]]:
    for name, module in list(sys.modules.items()):
        if (name not in _ONE_BY_ONE and not name.startswith(_LOOKED_AT)) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                inside = list(vars(value).items())
                yield from ((f"{name}.{key}.{at}", f) for at, held in inside if (f := _foreign(held)))
            elif found := _foreign(value):
                yield f"{name}.{key}", found


def _foreign(value: Any) -> types.FunctionType | None:
    function = getattr(value, "__func__", value)  # of a static or class method
    if isinstance(function, property):
        function = function.fget
    if not isinstance(function, types.FunctionType):
        return None
    file = function.__code__.co_filename
    own = file.startswith("<") or os.path.basename(file) == "typing_extensions.py"  # decorates what is deprecated
    return None if own or not counts(file) else function

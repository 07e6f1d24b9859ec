"""An optimizer in the graph as its author wrote it: its own ``step`` is traced.

``step`` runs on stand-ins: parameters with their gradients, the state that the optimizer keeps of each, and numbers of
a `Tape` instead of learning rates and counts. What it writes to tensors is in the graph. What it writes to numbers is
written on the host after each call. State that it makes is an output of the graph, unless
`stepgraph.capture.optimizer.update` could make it before.
"""

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from stepgraph import compat
from stepgraph.capture.optimizer.host import frozen, same
from stepgraph.capture.python.values import kind_of, of_program
from stepgraph.capture.state import unwrap, wrap
from stepgraph.errors import CaptureError

Tensor = torch.Tensor
pytree = compat.pytree

#: What torch keeps on every optimizer for itself; ``step`` may read its defaults.
OF_TORCH = (frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_opt_called"}) - {"defaults"}
#: Options of groups that ``step`` does not read.
_NOT_READ = ("params", "initial_lr")
NUMBERS = (int, float)
#: Options of torch's optimizers under which a trace of ``step`` would not hold for a second step.
_REFUSED = {
    "fused": "takes the learning rate as a plain number, which a graph would keep",
    "differentiable": "keeps the history of its updates for a backward, which a graph does not have",
}


@dataclass
class StandIn:
    """A parameter of one trace of ``step``. ``live``: the parameter. ``tensor``: its local stand-in. ``state``: those
    of its state's tensors, by `state_tensors`. ``path``: its module."""

    live: Tensor
    tensor: Tensor
    grad: Tensor | None
    state: dict[str, Tensor]
    path: str


@dataclass
class Learned:
    """What traces of an optimizer showed, for later ones. ``on_tape``: by (key, whether the parameter is a scalar),
    whether a scalar of the state is of the tape. ``moving``: (group, key) of options, (None, name) of attributes, that
    change from step to step. ``is_tried``: whether a trace has shown all that."""

    is_tried: bool = False
    on_tape: dict[tuple[str, bool], bool] = field(default_factory=dict)
    moving: set[tuple[int | None, str]] = field(default_factory=set)

    def is_moving(self, group: int | None, key: str, value: Any) -> bool:
        """Whether an option is a number of the tape, or a tuple of such."""
        if not ((group is not None and key == "lr") or (group, key) in self.moving):
            return False
        return type(value) in NUMBERS or (type(value) in (list, tuple) and all(type(v) in NUMBERS for v in value))


_LEARNED: weakref.WeakKeyDictionary[torch.optim.Optimizer, Learned] = weakref.WeakKeyDictionary()


class Again(Exception):
    """The trace learned what it should have begun with."""


class OwnStep:
    """One optimizer by its own ``step``. ``shapes``: of whole parameters whose shards may be padded, by their ids."""

    def __init__(self, optimizer: torch.optim.Optimizer, shapes: Mapping[int, Sequence[int]]):
        self.optimizer, self.shapes = optimizer, shapes
        self.name = type(optimizer).__qualname__
        self.learned = _LEARNED.setdefault(optimizer, Learned())
        self.step = _function(optimizer)
        #: Whether torch wrote its ``step``, which reads no attributes of parameters.
        self.is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        for key, value in vars(optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                raise ValueError(
                    f"{self.name}.{key} is another optimizer, {type(value).__qualname__}, whose step() a captured step "
                    "would not follow; pass that one, and do what is around it between steps"
                )
        for option, why in _REFUSED.items():
            if any(group.get(option) for group in optimizer.param_groups):
                raise ValueError(f"{self.name}({option}=True) {why}; use {option}=False")
        for group in optimizer.param_groups:
            for key, value in group.items():
                if type(value).__module__ == "numpy" and not isinstance(value, float):
                    raise ValueError(
                        f"{self.name} has {key}={value!r}, with which Python computes in NumPy's precision, and a "
                        f"captured step in its own; use {key}=float(...)"
                    )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        #: The shape of a parameter that is sharded; each rank then updates its part alone.
        self.sharded = next((list(param.shape) for param in params if _is_sharded(param)), None)
        if self.sharded is not None and (names := shape_names(optimizer)):
            self.refuse_shards(f"reads {' and '.join(sorted(names))} of tensors")

    def refuse_shards(self, what: str) -> NoReturn:
        """Raise for an update that needs more of a parameter than this rank's part."""
        raise CaptureError(
            f"{self.name}.step {what}, so it needs whole parameters, and one of shape {self.sharded} is sharded; use "
            "an optimizer that works element by element, such as AdamW, or replicate the parameters (ddp)"
        )

    def state_tensors(self, param: Tensor) -> dict[str, Tensor]:
        """The tensors of the state of ``param`` that are inputs of the graph, by key; of containers with a number."""
        found = {}
        for key, value in self.optimizer.state.get(param, {}).items():
            for name, leaf in leaves_of(key, value):
                if isinstance(leaf, Tensor) and not self.is_on_tape(param, key, leaf):
                    found[name] = leaf
        return found

    def is_on_tape(self, param: Tensor, key: str, value: Tensor) -> bool:
        """Whether a tensor of the state is a scalar on the host, which follows from counts and options."""
        plain = not (compat.is_fake(value) or compat.is_traceable_wrapper_subclass(value))
        if value.ndim or value.device.type != "cpu" or not plain:
            return False
        return self.learned.on_tape.get((key, param.ndim == 0), param.ndim > 0 or key == "step")

    def options(self) -> tuple:
        """What the graph holds as constants, options of groups and attributes: in a form that `same` compares."""
        return tuple((key, frozen(value)) for group, key, value in self.all_options() if key not in _NOT_READ
                     and not self.learned.is_moving(group, key, value))  # fmt: skip

    def code(self) -> dict[str, Any]:
        """The classes that define the optimizer, where they are no library's, and objects that it holds."""
        own = [cls for cls in type(self.optimizer).__mro__ if of_program(cls)]
        found: dict[str, Any] = {f"{self.name}.step": self.step} if own else {}
        found |= {cls.__qualname__: cls for cls in own}
        held = {key: value for key, value in vars(self.optimizer).items() if key not in OF_TORCH}
        return found | {
            f"{self.name}.{key}": value for key, value in held.items() if kind_of(type(value)) == "instance"
        }

    def all_options(self) -> Iterator[tuple[int | None, str, Any]]:
        for index, group in enumerate(self.optimizer.param_groups):
            yield from ((index, key, value) for key, value in group.items())
        yield from ((None, key, value) for key, value in vars(self.optimizer).items() if key not in OF_TORCH)

    def learn_changes(self, before: tuple) -> None:
        """Numbers that have changed since ``before``, what `options` gave, are of the tape from now on."""
        given = [
            (g, k, v) for g, k, v in self.all_options() if k not in _NOT_READ and not self.learned.is_moving(g, k, v)
        ]
        if [key for _, key, _ in given] != [key for key, _ in before]:
            return
        for (group, key, value), (_, old) in zip(given, before, strict=True):
            if not same(frozen(value), old):
                self.learned.moving.add((group, key))


def _function(optimizer: torch.optim.Optimizer) -> Callable:
    """``step`` without what torch wraps around it: profiling, and the hooks that a captured step refuses."""
    function = type(optimizer).step
    function = getattr(function, "__wrapped__", function) if getattr(function, "hooked", False) else function
    needed = list(inspect.signature(function).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed):
        code = inspect.unwrap(function).__code__
        raise ValueError(
            f"{type(optimizer).__qualname__}.step ({code.co_filename}:{code.co_firstlineno}) needs a closure that runs "
            "the model again, which a captured step does not have; capture without an optimizer and step it yourself"
        )
    return function


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor of the state."""
    return unwrap(tensor)[0]


def as_held(live: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """``parts`` as ``step`` sees them instead of ``live``: of a DTensor this rank's part, else wrapped."""
    return parts[0] if isinstance(live, DTensor) else wrap(parts, unwrap(live)[1])


def _is_sharded(param: Tensor) -> bool:
    placements = enumerate(getattr(param, "placements", ()))
    return any(placement.is_shard() and param.device_mesh.size(axis) > 1 for axis, placement in placements)


def shape_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """The attributes that give a tensor's shape, as far as the code of ``optimizer`` names them: its class, its helper
    objects, and the functions, classes and modules that these name.

    torch's own code is left out: it computes without the shape, or by operators that show it.
    """
    found: set[str] = set()
    seen: set[int] = set()
    pending: list[Any] = [type(optimizer), *map(type, vars(optimizer).values())]
    while pending:
        value = pending.pop()
        home = getattr(value, "__module__", None) or ""
        if id(value) in seen or home.partition(".")[0] in ("torch", *sys.stdlib_module_names):
            continue
        seen.add(id(value))
        if isinstance(value, type):
            pending += [*value.__mro__[1:], *vars(value).values()]
        elif isinstance(value, property):
            pending.append(value.fget)
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            pending.append(value.__func__)
        elif isinstance(value, types.FunctionType):
            names = _names(value.__code__)
            found |= names & {"shape", "size", "numel", "nelement"}
            named = [value.__globals__[name] for name in names if name in value.__globals__]
            held = [vars(part)[name] for part in named if isinstance(part, types.ModuleType)
                    for name in names if name in vars(part)]  # fmt: skip
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
            pending += [getattr(value, "__wrapped__", None), *named, *held, *cells]
    return found


def _names(code: types.CodeType) -> set[str]:
    """The names in a function's code, and in the functions that it defines."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inner)


def leaves_of(key: str, value: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of the value under ``key``, a container or not."""
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return [(key, value)]
    return [(f"{key}.{i}", leaf) for i, leaf in enumerate(leaves)]

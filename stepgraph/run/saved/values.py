"""Arguments, operators and recorded values of nodes as JSON, and back."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture import autocast

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class NotSavable(ValueError):
    """A step holds what has no saved form; the message says what, in one line."""


class NotLoadable(ValueError):
    """A saved step does not fit this process; the message says why, in one line."""


def encode(value: Any, own: torch.device | None) -> Any:
    """A node's argument as JSON. ``own``: the device of this rank, which is written without its number."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if value - value == 0 else {"float": str(value)}  # JSON has no nan and no inf
    if type(value) is complex:
        return {"complex": [encode(value.real, own), encode(value.imag, own)]}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "own" if value == own else str(value)}
    if isinstance(value, torch._ops.OpOverload):
        return {"operator": str(value)}
    if isinstance(value, slice):
        return {"slice": [encode(v, own) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.Size):
        return {"size": list(map(int, value))}
    if isinstance(value, (list, tuple)):
        inside = [encode(item, own) for item in value]
        return {"tuple": inside} if isinstance(value, tuple) else inside
    if isinstance(value, dict):
        return {"dict": [[encode(key, own), encode(item, own)] for key, item in value.items()]}
    raise NotSavable(f"an argument of type {type(value).__name__} has no saved form")


def decode(value: Any, own: torch.device | None, node: Callable[[str], Any] = str) -> Any:
    """The inverse of `encode`; ``node``: the node of a name."""
    if isinstance(value, list):
        return [decode(item, own, node) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    match kind:
        case "node":
            return node(inside)
        case "float":
            return float(inside)
        case "complex":
            return complex(*(decode(part, own) for part in inside))
        case "device":
            return own if inside == "own" else torch.device(inside)
        case "operator":
            return operator_named(inside)
        case "slice":
            return slice(*(decode(part, own, node) for part in inside))
        case "size":
            return torch.Size(inside)
        case "tuple":
            return tuple(decode(item, own, node) for item in inside)
        case "dict":
            return {decode(key, own, node): decode(item, own, node) for key, item in inside}
    found = getattr(torch, inside)
    if kind not in _NAMED or not isinstance(found, _NAMED[kind]):
        raise NotLoadable(f"{inside!r} is no {kind} of torch")
    return found


def target_name(target: Any) -> str:
    """What a node calls, by name."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order {target.name()}"
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"python {name}"
    raise NotSavable(f"a call of {target} has no saved form: make it an operator by torch.library.custom_op")


@functools.cache
def target_named(name: str) -> Any:
    """The inverse of `target_name`."""
    kind, _, rest = name.partition(" ")
    if kind == "python":
        return getattr(operator, rest)
    if kind == "higher_order":
        return getattr(torch.ops.higher_order, rest)
    return operator_named(name)


@functools.cache
def operator_named(name: str) -> torch._ops.OpOverload:
    """The operator of a name such as ``aten.mm.default``."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        if namespace == autocast.NAMESPACE:
            return autocast.named(packet)
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise NotLoadable(f"the operator {name} is not registered here: import the library that has it") from None


class Forms:
    """Recorded values (``meta["val"]``) as JSON. Tensors that share storage share it again where they are read."""

    def __init__(self, own: torch.device | None):
        self.own = own
        self.storages: list[list[Any]] = []  # bytes and device of each
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is given twice

    def encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, (list, tuple)):
            return {"several": [self.encode(item) for item in value], "list": isinstance(value, list)}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotSavable("a symbolic size has no saved form: capture with static shapes")
        return {"plain": encode(value, self.own)}

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if value.layout is not torch.strided or compat.is_traceable_wrapper_subclass(value):
            raise NotSavable(f"a value of layout {value.layout} ({type(value).__name__}) has no saved form")
        key = compat.storage_key(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self._kept.append(value)
            self.storages.append([value.untyped_storage().nbytes(), encode(value.device, self.own)["device"]])
        dtype = str(value.dtype).removeprefix("torch.")
        bits = ["conj"] * value.is_conj() + ["neg"] * value.is_neg()
        where = [value.storage_offset(), self._numbers[key]]
        return [dtype, list(value.shape), list(value.stride()), *where, *bits]


class Values:
    """Reads what `Forms` wrote, as fake tensors of ``mode``; used outside all modes."""

    def __init__(self, storages: list[list[Any]], own: torch.device | None, mode: compat.FakeTensorMode):
        self.own, self.mode = own, mode
        self.storages = [(decode({"device": on}, own), compat.fake_storage(size)) for size, on in storages]

    def decode(self, form: Mapping[str, Any]) -> Any:
        """The value of a form."""
        if "tensor" in form:
            return self._tensor(*form["tensor"])
        if "several" in form:
            values = [self.decode(item) for item in form["several"]]
            return values if form["list"] else tuple(values)
        return decode(form["plain"], self.own)

    def _tensor(self, dtype: str, shape: list, strides: list, offset: int, storage: int, *bits: str) -> torch.Tensor:
        device, memory = self.storages[storage]
        tensor = compat.fake_tensor(self.mode, device, getattr(torch, dtype), memory, offset, shape, strides)
        for bit in bits:
            tensor = tensor.conj() if bit == "conj" else compat.negative_view(tensor)
        return tensor

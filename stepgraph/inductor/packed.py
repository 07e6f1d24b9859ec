"""Graphs as bytes: what nodes call and hold, and the forms of their values, which share storage again where they did.

A saved step keeps its graphs so (`stepgraph.run.saved`), and pieces go so to processes that compile them. They are
unpickled, node by node, so that each finds the ones before it.
"""

import functools
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import compat

#: Where what a node holds is defined: constants of torch and containers. All else is refused.
_HOMES = ("stepgraph", "torch", "builtins", "collections", "_operator")


class NotSavable(ValueError):
    """A graph holds what has no packed form; the message says what, in one line."""


class NotLoadable(ValueError):
    """Bytes of a graph do not fit this process; the message says why, in one line."""


class Packed(NamedTuple):
    """A node. ``target``: what it calls, or what represents that in its packed form."""

    op: str
    target: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


class Packer(pickle.Pickler):
    """Pickles nodes by name, tensors by form. ``own``: the device of this rank, which is written without its number.
    ``canonical``: equal graphs have equal, if longer, bytes, whichever objects they share. Raises `NotSavable`."""

    def __init__(self, stream: io.BytesIO, own: torch.device | None = None, canonical: bool = False):
        super().__init__(stream)
        self.own, self.fast = own, canonical  # without a memo of objects
        self._storages: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no address is given twice

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, fx.Node):
            found = "node", value.name
        elif isinstance(value, torch.Tensor):
            found = "tensor", *self._form(value)
        else:
            return ("own",) if isinstance(value, torch.device) and value == self.own else None
        return repr(found) if self.fast else found

    def _form(self, value: torch.Tensor) -> tuple[Any, ...]:
        """(device, None for its own, dtype, both by name, (number of its storage, its bytes), offset, shape, strides,
        conjugate, negative)."""
        if value.layout is not torch.strided or compat.is_traceable_wrapper_subclass(value):
            raise NotSavable(f"a value of layout {value.layout} ({type(value).__name__}) has no saved form")
        number = self._storages.setdefault(compat.storage_key(value), len(self._storages))
        self._kept.append(value)
        memory = number, value.untyped_storage().nbytes()
        where = value.storage_offset(), tuple(value.shape), value.stride()
        device = None if value.device == self.own else str(value.device)
        return device, str(value.dtype), memory, *where, value.is_conj(), value.is_neg()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (str(value), str(value._schema))
        if isinstance(value, torch._ops.HigherOrderOperator):
            return _higher_order, (value.name(),)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotSavable("a symbolic size has no saved form: capture with static shapes")
        home = getattr(value, "__module__", None) or type(value).__module__
        if home.partition(".")[0] not in _HOMES:
            raise NotSavable(f"a value of type {type(value).__name__} has no saved form")
        return NotImplemented

    def add(self, value: Any) -> None:
        """Pickle ``value`` after those before it."""
        try:
            self.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as failure:  # the last one is pybind's
            raise NotSavable(f"what it holds has no saved form: {failure}") from None


@functools.cache
def _operator(name: str, schema: str) -> torch._ops.OpOverload:
    """The operator of a name such as ``aten.mm.default``."""
    try:
        found = operator.attrgetter(name)(torch.ops)
    except AttributeError:
        raise NotLoadable(f"the operator {name} is not registered here: import the library that has it") from None
    if str(found._schema) != schema:
        raise NotLoadable(f"the operator {name} is {found._schema}, saved was {schema}")
    return found


def _higher_order(name: str) -> torch._ops.HigherOrderOperator:
    return getattr(torch.ops.higher_order, name)


class Unpacker(pickle.Unpickler):
    """Reads what `Packer` wrote, outside all modes: tensors as fake ones of ``mode``, nodes from ``nodes``, by name."""

    def __init__(self, data: bytes, mode: compat.FakeTensorMode, own: torch.device | None = None):
        super().__init__(io.BytesIO(data))
        self.mode, self.own = mode, own
        self.nodes: dict[str, fx.Node] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        kind, *parts = pid
        if kind != "tensor":
            return self.own if kind == "own" else self.nodes[parts[0]]
        device, dtype, (number, size), *where, conjugate, negative = parts
        if number not in self._storages:
            self._storages[number] = compat.fake_storage(size)
        made = self.own if device is None else torch.device(device), getattr(torch, dtype.removeprefix("torch."))
        tensor = compat.fake_tensor(self.mode, *made, self._storages[number], *where)
        tensor = tensor.conj() if conjugate else tensor
        return compat.negative_view(tensor) if negative else tensor


def write_graph(graph: fx.Graph, packer: Packer, packed: Callable[[fx.Node], Packed]) -> None:
    """Pickle the nodes of ``graph``, each as ``packed`` gives it."""
    packer.add(len(graph.nodes))
    for node in graph.nodes:
        packer.add(tuple(packed(node)))  # plain, as it is quicker


def read_graph(unpacker: Unpacker, target: Callable[[Packed], Any]) -> fx.Graph:
    """The graph that was written; ``target``: what a node calls."""
    graph = fx.Graph()
    with compat.without_modes():
        for _ in range(unpacker.load()):
            packed = Packed(*unpacker.load())
            node = graph.create_node(packed.op, target(packed), packed.args, packed.kwargs, name=packed.name)
            if node.name != packed.name:
                compat.rename_exactly(node, packed.name)
            node.meta.update(packed.meta)
            unpacker.nodes[packed.name] = node
    return graph


def pack(piece: fx.GraphModule, options: dict[str, Any]) -> bytes:
    """``piece``, as `stepgraph.inductor.regional` extracts it, with its ``options``. Raises `NotSavable`."""

    def packed(node: fx.Node) -> Packed:
        if node.op == "get_attr":
            raise NotSavable("it calls another graph")
        meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        return Packed(node.op, node.target, node.name, node.args, dict(node.kwargs), meta)

    stream = io.BytesIO()
    packer = Packer(stream)
    write_graph(piece.graph, packer, packed)
    packer.add(options)
    return stream.getvalue()


def unpack(data: bytes) -> tuple[fx.GraphModule, dict[str, Any]]:
    """What was packed, with fake tensors of one mode as inputs. Torch's cache keys contain the class of the piece."""
    unpacker = Unpacker(data, compat.FakeTensorMode())
    graph = read_graph(unpacker, lambda packed: packed.target)
    return compat.lazy_graph_module({}, graph), unpacker.load()

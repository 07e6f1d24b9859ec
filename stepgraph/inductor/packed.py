"""A piece of a graph as bytes that another process unpacks: its nodes, the forms of their values, and its options.

Unlike a saved step (`stepgraph.run.saved`) they never leave the machine, and are unpickled.
"""

import io
import operator
import pickle
from typing import Any

import torch
from torch import fx

from stepgraph import compat


class Unpackable(ValueError):
    """A piece that has no packed form: one that calls other graphs, or options that no other process can have."""


class _Place(int):
    """Represents a node: its place among the nodes before."""


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO):
        super().__init__(stream)
        self.storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (str(value),)
        if isinstance(value, torch.Tensor):
            number = self.storages.setdefault(compat.storage_key(value), len(self.storages))
            storage = number, value.untyped_storage().nbytes()
            return _Form, (value.device, value.dtype, storage, value.storage_offset(), value.shape, value.stride())
        return NotImplemented


class _Form:
    """(device, dtype, (number of its storage, its bytes), offset, shape, strides) of a tensor."""

    def __init__(self, *parts: Any):
        self.parts = parts


def _operator(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops)


def pack(piece: fx.GraphModule, options: dict[str, Any]) -> bytes:
    """``piece``, as `stepgraph.inductor.regional` extracts it, with its ``options``. Raises `Unpackable`."""
    places: dict[fx.Node, _Place] = {}
    nodes = []
    for node in piece.graph.nodes:
        if node.op == "get_attr":
            raise Unpackable("it calls another graph")
        args, kwargs = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        nodes.append((node.op, node.target, node.name, args, kwargs, node.meta.get("val")))
        places[node] = _Place(len(places))
    stream = io.BytesIO()
    try:
        _Packer(stream).dump((nodes, options))
    except (pickle.PicklingError, TypeError, AttributeError) as failure:
        raise Unpackable(str(failure)) from None
    return stream.getvalue()


def unpack(data: bytes) -> tuple[fx.GraphModule, dict[str, Any]]:
    """What was packed, its inputs fake tensors of one mode."""
    nodes, options = pickle.loads(data)
    graph, mode, made = fx.Graph(), compat.FakeTensorMode(), []
    storages: dict[int, torch.UntypedStorage] = {}

    def tensor(form: _Form) -> torch.Tensor:
        device, dtype, (number, size), *where = form.parts
        if number not in storages:
            storages[number] = compat.fake_storage(size)
        return compat.fake_tensor(mode, device, dtype, storages[number], *where)

    with compat.without_modes():
        for op, target, name, args, kwargs, value in nodes:
            args, kwargs = compat.pytree.tree_map_only(_Place, made.__getitem__, (args, kwargs))
            made.append(graph.create_node(op, target, args, kwargs, name=name))
            if value is not None:
                made[-1].meta["val"] = compat.pytree.tree_map_only(_Form, tensor, value)
    return fx.GraphModule({}, graph), options

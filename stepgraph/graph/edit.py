"""How passes edit a graph: they add nodes, replace nodes, and remove nodes that nothing reads.

A new node has what a traced one has: its fake value, and the provenance of the nodes that it replaces.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.aliases import written_arguments
from stepgraph.graph.facts import is_mutating, is_overload, is_pure
from stepgraph.graph.provenance import provenance, set_provenance, together

aten = torch.ops.aten

#: Namespaces of collectives, and of ours; none of their operators has another effect, but for writes in their schema.
_COLLECTIVES = ("_c10d_functional", "stepgraph")


class Builder:
    """Adds nodes to the graph of the nodes ``like``, in their name.

    What replaces several nodes has the provenance of all (see `provenance.together`). ``before``, ``after``: the
    place; each new node comes after the last one. Without a place: where the graph inserts nodes, as inside
    ``with graph.inserting_before(node)``.

        build = Builder(old, before=old)
        new = build(aten.mul.Tensor, x, 2.0)
    """

    def __init__(self, *like: fx.Node, before: fx.Node | None = None, after: fx.Node | None = None):
        self.graph, self.origin = like[0].graph, together([provenance(node) for node in like])
        self.place = before if after is None else after.next

    def __call__(self, target: Callable, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A node that calls ``target``; ``like``: in the name of this node instead."""
        with self.graph.inserting_before(self.place) if self.place else contextlib.nullcontext():
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value_of(node)
        set_provenance(node, provenance(like) if like else self.origin)
        return node

    def value_of(self, node: fx.Node) -> Any:
        """The fake value of a new node."""
        return fake_value(node)

    def cast(self, node: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``dtype``: itself, if it has that."""
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype, like=like)

    def view(self, node: fx.Node, shape: Sequence[int], like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``shape``: itself, if it has that."""
        return node if node.meta["val"].shape == shape else self(aten.view.default, node, list(shape), like=like)


def fake_value(node: fx.Node) -> Any:
    """What the node's call gives for the fake values of its arguments. No memory is allocated, no number drawn."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    mode = next(n.meta["val"] for n in node.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)).fake_mode
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def _value(node: fx.Node) -> Any:
    """The fake value of ``node``; a graph that a higher-order operator calls is itself."""
    return getattr(node.graph.owning_module, node.target) if "val" not in node.meta else node.meta["val"]


class FakeValues:
    """`fake_value` for many similar calls, such as the updates of all parameters: each kind is evaluated once.

    Every node gets a tensor of its own, as an operator gives it. Only for operators whose result depends on nothing
    but dtypes, shapes, strides and devices, and that make a new tensor or, written in place, return their argument.
    """

    def __init__(self):
        #: By the call, its tensors by their form: what it gave.
        self._known: dict[tuple, compat.FakeTensor] = {}

    def __call__(self, node: fx.Node) -> Any:
        """The fake value of ``node``."""
        if is_mutating(node):
            (written,) = written_arguments(node)
            return written.meta["val"]
        key = (node.target, *map(_form, node.args), *((name, _form(value)) for name, value in node.kwargs.items()))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = fake_value(node)
            return known
        shape, strides, dtype = known.shape, known.stride(), known.dtype
        with torch.no_grad():
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return compat.FakeTensor(known.fake_mode, made, known.device)


def _form(value: Any) -> Any:
    """What the result of a call depends on in an argument."""
    if isinstance(value, fx.Node):
        tensor = value.meta["val"]
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return type(value), value


def replace(old: fx.Node, new: fx.Node) -> None:
    """Every reader of ``old`` reads ``new``, and ``old`` goes. What only it read stays: see `erase_unread`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_all(new_of: dict[fx.Node, fx.Node]) -> None:
    """`replace` each key by its value, none of which is a key. What reads many of them, as one update of all
    parameters does, is rewritten once instead of once for each."""
    for user in dict.fromkeys(user for old in new_of for user in old.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: new_of.get(n, n))
    for old in new_of:
        old.graph.erase_node(old)


def erase_unread(*nodes: fx.Node, collectives: bool = False) -> int:
    """Erase the ``nodes`` that nothing reads, then what only they read; how many.

    Only pure nodes go, and with ``collectives`` also nodes that communicate: every rank must then erase the same ones.
    """
    erased: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in erased or node.users or not (is_pure(node) or (collectives and _only_communicates(node))):
            continue
        queue += node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
    return len(erased)


def _only_communicates(node: fx.Node) -> bool:
    return is_overload(node) and node.target.namespace in _COLLECTIVES and not is_mutating(node)

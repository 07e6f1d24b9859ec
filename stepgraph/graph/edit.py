"""How passes edit a graph: nodes come in, take the places of others, and go when nothing reads them.

A new node has what a traced one has: its fake value, and the provenance of the nodes that it stands for.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.graph.facts import is_mutating, is_overload, is_pure
from stepgraph.graph.provenance import provenance, set_provenance, together

aten = torch.ops.aten

_COLLECTIVES = ("_c10d_functional", "stepgraph")  # namespaces of operators that compute or communicate, no more


class Builder:
    """Adds nodes to the graph of the nodes ``like``, in their name.

    What stands for several belongs to the innermost module that holds them all (see `together`).
    ``before``, ``after``: the place, with each new node behind the last; without, where the graph inserts
    (``graph.inserting_before``).

        build = Builder(old, before=old)
        new = build(aten.mul.Tensor, x, 2.0)
    """

    def __init__(self, *like: fx.Node, before: fx.Node | None = None, after: fx.Node | None = None):
        self.graph, self.origin = like[0].graph, together([provenance(node) for node in like])
        self.place = before if after is None else after.next

    def __call__(self, target: Callable, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A node that calls ``target``; ``like``: stands for this node, unlike the others."""
        with self.graph.inserting_before(self.place) if self.place else contextlib.nullcontext():
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_value(node)
        set_provenance(node, provenance(like) if like else self.origin)
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``dtype``: itself, if it has that."""
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype, like=like)

    def view(self, node: fx.Node, shape: Sequence[int], like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``shape``: itself, if it has that."""
        return node if node.meta["val"].shape == shape else self(aten.view.default, node, list(shape), like=like)


def fake_value(node: fx.Node) -> Any:
    """What the node's call gives for the fake values of its arguments. No memory is allocated, no number drawn."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next(n.meta["val"] for n in node.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)).fake_mode
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Every reader of ``old`` reads ``new``, and ``old`` goes. What only it read stays: see `erase_unread`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def erase_unread(*nodes: fx.Node, collectives: bool = False) -> int:
    """Erase those of ``nodes`` that nothing reads, then what only they read; how many.

    Only pure nodes go, and with ``collectives`` those that communicate too: on every rank the same ones.
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

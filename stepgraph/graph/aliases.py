"""Which nodes share memory, and where it is written."""

import functools
import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import (
    HIDDEN_WRITES,
    TRAINING,
    is_launch,
    is_mutating,
    is_view,
    of_target,
    returns_view,
    writes,
)

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that ``node`` writes into."""
    if is_launch(node):
        return [node.args[i] for i in node.target.writes]
    if node.target in HIDDEN_WRITES:
        if any(flag is False for flag in node.args[TRAINING : TRAINING + 1]):  # statistics are only read
            return []
        return [node.args[i] for i in HIDDEN_WRITES[node.target] if isinstance(node.args[i], fx.Node)]
    written: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, fx.Node):
                written.append(item)
    return written


def is_written(node: fx.Node) -> bool:
    """Whether a node writes into the result of ``node`` or into a view of it: what made it then does not say what its
    readers see."""
    for user in node.users:
        if (is_mutating(user) and node in written_arguments(user)) or (is_view(user) and is_written(user)):
            return True
    return False


def memory_span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(the storage of ``tensor``, the byte at which its elements begin there, the byte after the last of them)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, width = tensor.storage_offset(), tensor.element_size()
    return compat.storage_key(tensor), start * width, (start + last + 1) * width


@of_target
def _owns(target: Any) -> bool:
    """Whether the result has a storage of its own, and no other is written."""
    return not (target in (operator.getitem, _WAIT) or writes(target) or returns_view(target))


def _overlapping(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For inputs that share memory with others, such as a buffer that is a view of a parameter, one of them."""
    sharing: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.numel():
            sharing[compat.storage_key(value)].append(node)
    found: dict[fx.Node, fx.Node] = {}
    for nodes in sharing.values():
        if len(nodes) == 1:
            continue
        first, reached = None, -1
        spans = [(*memory_span(node.meta["val"])[1:], node) for node in nodes]
        for start, end, node in sorted(spans, key=lambda span: span[:2]):
            first = first if start < reached else node
            found[node], reached = first, max(reached, end)
    return found


class Aliases:
    """Which node owns the storage that each node's result lives in, and where each storage is written.

    ``position[node]``: index in the graph. ``writes[root]``: positions of nodes that write into the root's storage;
    inputs that overlap each have the writes of all of them. A multi-output operator's outputs are owned by their
    getitem nodes.
    """

    def __init__(self, graph: fx.Graph):
        self.position: dict[fx.Node, int] = {}
        self.writes: dict[fx.Node, list[int]] = defaultdict(list)
        self._root: dict[fx.Node, fx.Node] = {}
        self._inputs = _overlapping(graph)
        for i, node in enumerate(graph.nodes):
            self.position[node] = i
            if node.op != "call_function":
                root = self._inputs.get(node, node)
            elif _owns(node.target):
                root = node
            elif is_mutating(node):
                written = written_arguments(node)
                root = self._root_of_writing(node, written)
                for one in written:
                    self.writes[self._root[one]].append(i)
            elif is_view(node) or node.target is _WAIT:
                # Waiting for a collective gives back its result; no view, since none may take its place.
                root = self._root.get(node.args[0], node)  # of a number that the model writes, a tensor of its own
            else:
                root = node
            self._root[node] = root
        for node, root in self._inputs.items():
            if root in self.writes:
                self.writes[node] = self.writes[root]

    @functools.cached_property
    def _members(self) -> dict[fx.Node, list[fx.Node]]:
        members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, root in self._root.items():
            members[root].append(node)
        return members

    def _root_of_writing(self, node: fx.Node, written: list[fx.Node]) -> fx.Node:
        # What it returns is what it wrote only if its schema says so: a loss may be returned too.
        one = len(written) == 1 and isinstance(node.meta.get("val"), torch.Tensor)
        return self._root[written[0]] if one and node.target._schema.returns[0].alias_info is not None else node

    def root(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage of ``node``'s result."""
        return self._root[node]

    def written_between(self, node: fx.Node, first: int, last: int) -> bool:
        """Whether the storage of ``node`` is written at a position in (first, last)."""
        return any(first < p < last for p in self.writes.get(self.root(node), ()))

    def reads(self, node: fx.Node, besides: tuple[fx.Node, ...] = ()) -> list[int]:
        """Positions of the nodes that read any alias of ``node``'s storage, except ``besides``."""
        members = self._members[self.root(node)]
        return [self.position[user] for n in members for user in n.users if user not in besides]

    def merge(self, node: fx.Node, root: fx.Node, last: dict[fx.Node, int]) -> None:
        """``node``'s result now lives in ``root``'s storage; ``last`` (see `last_use`) follows."""
        old = self._root[node]
        last[root] = max(last[root], last[old])
        for member in self._members.pop(old):
            self._root[member] = root
            self._members[root].append(member)

    def last_use(self) -> dict[fx.Node, int]:
        """For every root, the position of the last node that reads any alias of it."""
        last: dict[fx.Node, int] = {}
        for node, position in self.position.items():
            root = self.root(node)
            last[root] = max(last.get(root, 0), position)
            for user in node.users:
                last[root] = max(last[root], self.position[user])
        return last

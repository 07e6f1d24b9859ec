"""Facts about a flat graph that several passes need: purity, aliasing, mutation and bytes."""

import functools
import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten
higher_order = torch.ops.higher_order

#: Share their argument's storage although their schema does not say so.
_HIDDEN_VIEWS = {
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}

#: Write into arguments although their schema does not say so: the positions of running mean and variance.
_HIDDEN_WRITES = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4)}

#: Higher-order operators that only compute.
_PURE_HIGHER_ORDER = {higher_order.flex_attention, higher_order.flex_attention_backward}


#: Operators that dominate a step's arithmetic.
EXPENSIVE = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.convolution, aten._scaled_mm, aten._grouped_mm,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_attention_math, aten.sort, aten.topk,
}  # fmt: skip

# Facts of operators are asked for at every node of a graph by most passes, and schemas are slow to read.


@functools.cache
def _draws(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable or target in _HIDDEN_WRITES


@functools.cache
def _views(target: OpOverload) -> bool:
    returns = target._schema.returns
    shares = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return shares or target in _HIDDEN_VIEWS


def is_overload(node: fx.Node) -> bool:
    """Whether the node calls a torch operator (not a higher-order one, not getitem)."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator. Attention does only where its dropout is not zero."""
    return is_overload(node) and _draws(node.target) and argument(node, "dropout_p") != 0


def argument(node: fx.Node, name: str) -> Any:
    """What the operator call passes as ``name``, its default if nothing; None where there is no such argument."""
    for i, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, parameter.default_value)
    return None


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return is_overload(node) and _writes(node.target)


def is_pure(node: fx.Node) -> bool:
    """Whether the node may be removed when unused, or run again for the same result."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_random(node) or is_mutating(node):
        return False
    if is_overload(node):
        # An operator that returns nothing is there for its effect, as an assertion is.
        return node.target.namespace in ("aten", "prims") and bool(node.target._schema.returns)
    return node.target is operator.getitem or node.target in _PURE_HIGHER_ORDER


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares storage with its first argument without writing to it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return is_overload(node) and _views(node.target)


def getitem_users(node: fx.Node) -> dict[int, fx.Node]:
    """The getitem nodes that take ``node``'s outputs apart, by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the tensor or tensors that ``node`` produces."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


class Aliases:
    """Which node owns the storage that each node's result lives in, and where each storage is written.

    ``position[node]``: index in the graph. ``writes[root]``: positions of nodes that write into the root's storage.
    A multi-output operator's outputs are owned by their getitem nodes.
    """

    def __init__(self, graph: fx.Graph):
        self.position: dict[fx.Node, int] = {}
        self.writes: dict[fx.Node, list[int]] = defaultdict(list)
        self._root: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for i, node in enumerate(graph.nodes):
            self.position[node] = i
            self._root[node] = self._find_root(node)
            self._members[self._root[node]].append(node)
            if is_mutating(node):
                for written in written_arguments(node):
                    self.writes[self.root(written)].append(i)

    def _find_root(self, node: fx.Node) -> fx.Node:
        # Waiting for a collective gives back its result; no view, since none may take its place.
        if is_view(node) or node.target is torch.ops._c10d_functional.wait_tensor.default:
            return self._root[node.args[0]]
        # What a writing operator returns is what it wrote only if its schema says so: a loss may come out beside.
        if is_mutating(node) and isinstance(node.meta.get("val"), torch.Tensor):
            written = written_arguments(node)
            if len(written) == 1 and node.target._schema.returns[0].alias_info is not None:
                return self._root[written[0]]
        return node

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


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that ``node`` writes into."""
    if node.target in _HIDDEN_WRITES:
        return [node.args[i] for i in _HIDDEN_WRITES[node.target] if isinstance(node.args[i], fx.Node)]
    written: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, fx.Node):
                written.append(item)
    return written

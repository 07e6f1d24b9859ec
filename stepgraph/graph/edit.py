"""How passes edit a graph: they add nodes, replace nodes, and remove nodes that nothing reads.

A new node has what a traced one has: its fake value, and the provenance of the nodes that it replaces.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.aliases import written_arguments
from stepgraph.graph.facts import is_mutating, is_overload, is_pure, is_view
from stepgraph.graph.provenance import provenance, set_provenance, together

aten = torch.ops.aten

#: Namespaces of collectives, and of ours; their operators have no other effect than writes in their schema.
_COLLECTIVES = ("_c10d_functional", "stepgraph")


class Builder:
    """Adds nodes to the graph of the nodes ``like``, in their name.

    What replaces several nodes has the provenance of all (see `provenance.together`). ``before``, ``after``: the
    place; each new node comes after the last one. Without a place: where the graph inserts nodes, as inside
    ``with graph.inserting_before(node)``. ``mark``: one of `stepgraph.graph.marks` for every new node.

        build = Builder(old, before=old)
        new = build(aten.mul.Tensor, x, 2.0)
    """

    def __init__(
        self, *like: fx.Node, before: fx.Node | None = None, after: fx.Node | None = None, mark: str | None = None
    ):
        self.graph, self.origin = like[0].graph, together([provenance(node) for node in like])
        self.place, self.mark = before if after is None else after.next, mark

    def __call__(self, target: Callable, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A node that calls ``target``; ``like``: in the name of this node instead."""
        with self.graph.inserting_before(self.place) if self.place else contextlib.nullcontext():
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value_of(node)
        set_provenance(node, provenance(like) if like else self.origin)
        if self.mark:
            node.meta[self.mark] = True
        return node

    def parts(self, node: fx.Node, *places: int) -> list[fx.Node]:
        """The results of ``node`` at ``places``; all by default."""
        return [self(operator.getitem, node, i) for i in places or range(len(node.meta["val"]))]

    def traced(self, function: Callable[..., Any], *arguments: fx.Node) -> Any:
        """The operators of ``function``, plain torch, of the nodes ``arguments``: nodes in place of what it returns."""
        graph = compat.trace(function, [node.meta["val"] for node in arguments]).graph
        nodes, made = iter(graph.nodes), {}
        for argument in arguments:
            made[next(nodes)] = argument
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            if node.op == "output":
                return args[0]
            if node.users:
                made[node] = self(node.target, *args, **kwargs)

    def value_of(self, node: fx.Node) -> Any:
        """The fake value of a new node."""
        return fake_value(node)

    def cast(self, node: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``dtype``: itself, if it has that."""
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype, like=like)

    def view(self, node: fx.Node, shape: Sequence[int], like: fx.Node | None = None) -> fx.Node:
        """``node`` in ``shape``: itself, if it has that."""
        return node if node.meta["val"].shape == shape else self(aten.view.default, node, list(shape), like=like)

    def permute(self, node: fx.Node, order: Sequence[int], like: fx.Node | None = None) -> fx.Node:
        """``node`` with its dimensions in ``order``: itself, if they are."""
        order = list(order)
        return node if order == sorted(order) else self(aten.permute.default, node, order, like=like)

    def cat(self, nodes: Sequence[fx.Node], dim: int = 0) -> fx.Node:
        """``nodes`` one by one: itself, if there is one."""
        return nodes[0] if len(nodes) == 1 else self(aten.cat.default, list(nodes), dim)

    def total(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The sum of ``nodes``, added in their order."""
        return functools.reduce(lambda total, node: self(aten.add.Tensor, total, node), nodes)

    def add_product(self, total: fx.Node | None, a: fx.Node, b: fx.Node) -> fx.Node:
        """The product of the matrices ``a`` and ``b``, added to ``total`` in its memory where there is one."""
        return self(aten.mm.default, a, b) if total is None else self(aten.addmm.out, total, a, b, out=total)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """``node``, or a copy where it is not contiguous."""
        return node if node.meta["val"].is_contiguous() else self.copy(node)

    def copy(self, node: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """A contiguous copy of ``node``."""
        return self(aten.clone.default, node, memory_format=torch.contiguous_format, like=like)


#: By fake mode: by operator and the forms of its arguments, the forms of its results.
_KNOWN: "WeakKeyDictionary[compat.FakeTensorMode, dict[tuple, Any]]" = WeakKeyDictionary()


def fake_value(node: fx.Node) -> Any:
    """What the node's call gives for the fake values of its arguments. No memory is allocated, no number drawn.

    Equal calls are evaluated once where that gave new tensors, views of the first argument, or the argument that was
    written: every node still gets tensors of its own.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    mode = next(n.meta["val"] for n in node.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)).fake_mode
    known, written = _KNOWN.setdefault(mode, {}), _written(node)
    try:
        known_by_form = is_overload(node) and (written is not None or not is_mutating(node))
        key = (node.target, _offset(node, args), _form(args), _form(kwargs)) if known_by_form else None
        if key in known:
            return _made(known[key], mode, args) if written is None else written
    except TypeError:  # an argument that has no form
        key = None
    with mode, torch.no_grad():
        result = node.target(*args, **kwargs)
    if written is not None:
        if key is not None and result is written and key[2:] == (_form(args), _form(kwargs)):  # no form has changed
            known[key] = None
    elif key is not None and (made := _form_of_made(result, (args, kwargs), is_view(node))) is not None:
        known[key] = made
    return result


def _value(node: fx.Node) -> Any:
    """The fake value of ``node``; a graph that a higher-order operator calls is itself."""
    return getattr(node.graph.owning_module, node.target) if "val" not in node.meta else node.meta["val"]


def _form(value: Any) -> Any:
    """All of an argument that a result depends on. ``TypeError`` for what may have more: a tensor of known values or of
    symbolic sizes, or one of a class of its own."""
    if isinstance(value, torch.Tensor):
        if type(value) is not compat.FakeTensor or value.constant is not None or value.layout is not torch.strided:
            raise TypeError
        shape, strides, bits = tuple(value.shape), value.stride(), (value.is_conj(), value.is_neg())
        if not all(type(size) is int for size in (*shape, *strides)):
            raise TypeError
        return shape, strides, value.dtype, value.device, value.requires_grad, bits
    if isinstance(value, (list, tuple)):
        return type(value), *map(_form, value)
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    hash(value)
    return type(value), value


#: Views that begin as far behind their argument's first element wherever that lies.
_RELATIVE = {
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.alias.default, aten.detach.default),
}


def _offset(node: fx.Node, args: Sequence[Any]) -> int | None:
    """Where the first argument of a view begins in its storage; None where the result does not depend on it."""
    depends = is_view(node) and node.target not in _RELATIVE and isinstance(args[0], torch.Tensor)
    return args[0].storage_offset() if depends else None


def _written(node: fx.Node) -> torch.Tensor | None:
    """The argument that an operator writes and gives back, as ``out=``; None for others."""
    returns = node.target._schema.returns if is_overload(node) and is_mutating(node) else ()
    if len(returns) != 1 or returns[0].alias_info is None or len(written := written_arguments(node)) != 1:
        return None
    return written[0].meta["val"]


def _form_of_made(result: Any, given: Any, views: bool) -> Any:
    """The form of ``result``, one or several plain tensors, for `_made`; None unless each has memory of its own, or all
    are ``views`` of the first argument's."""
    tensors = list(result) if isinstance(result, (list, tuple)) else [result]
    if not all(type(t) is compat.FakeTensor and _is_plain(t) for t in tensors):
        return None
    storages = {compat.storage_key(t) for t in tensors}
    if views and isinstance(first := given[0][0], torch.Tensor) and storages == {compat.storage_key(first)}:
        begin = first.storage_offset()
        forms = [(t.dtype, t.device, t.storage_offset() - begin, t.shape, t.stride()) for t in tensors]
        return None if any(t is first for t in tensors) else (type(result), True, forms)
    before = {compat.storage_key(t) for t in compat.pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    if len(storages) < len(tensors) or storages & before or not all(map(_fills_storage, tensors)):
        return None
    return type(result), False, [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


def _is_plain(tensor: compat.FakeTensor) -> bool:
    """Whether shape, strides, place, dtype and device are all of it: it has no value."""
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        return False
    return tensor.layout is torch.strided and all(type(size) is int for size in (*tensor.shape, *tensor.stride()))


def _fills_storage(tensor: compat.FakeTensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    used = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    return not tensor.storage_offset() and tensor.untyped_storage().nbytes() == used * tensor.element_size()


def _made(made: Any, mode: compat.FakeTensorMode, args: Sequence[Any]) -> Any:
    """New tensors from the forms of `_form_of_made`."""
    kind, views, forms = made
    with torch.no_grad(), compat.without_modes():
        if views:
            storage, begin = args[0].untyped_storage(), args[0].storage_offset()
            tensors = [
                compat.fake_tensor(mode, device, dtype, storage, begin + by, *place)
                for dtype, device, by, *place in forms
            ]
        else:
            tensors = [compat.empty_fake(mode, *form) for form in forms]
    return kind(tensors) if issubclass(kind, (list, tuple)) else tensors[0]


def replace(old: fx.Node, new: fx.Node, *, sweep: bool = False) -> None:
    """Every reader of ``old`` reads ``new``, and ``old`` goes; with ``sweep`` what only it read too."""
    read = old.all_input_nodes
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
    if sweep:
        erase_unread(*read)


def take_place(old: fx.Node, new: fx.Node) -> None:
    """Replace ``old`` by ``new``, of the same shape, in the strides that what reads it was traced for."""
    old.replace_all_uses_with(in_strides_of(Builder(old, before=old), old, new))


def in_strides_of(build: Builder, old: fx.Node, new: fx.Node) -> fx.Node:
    """``new``, or a copy of it, in the strides that ``old``, of the same shape, has."""
    value, strides = old.meta["val"], zip(old.meta["val"].stride(), new.meta["val"].stride(), strict=True)
    if any(size > 1 and a != b for size, (a, b) in zip(value.shape, strides, strict=True)):
        outer_first = sorted(range(value.ndim), key=lambda dim: (-value.stride(dim), dim))
        back = sorted(range(value.ndim), key=outer_first.__getitem__)
        new = build.permute(build.copy(build.permute(new, outer_first)), back)
    return new


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

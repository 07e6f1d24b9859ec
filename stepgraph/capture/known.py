"""Values that follow from literals alone, such as positions by ``arange``: a trace may let Python look at them.

A step is traced without values, so ``if (positions.diff() != 1).any():`` has no answer in general. It has one where the
nodes behind the tensor start from no input of the step: they are then computed, on the CPU, when they are asked for.
Python so takes the branch that it takes in eager: Hugging Face models leave out an attention mask that says no more
than "causal".

Values are not known of random tensors, of uninitialized ones, of those that any operator wrote to in place, and of
those whose nodes are larger than `LARGEST`.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat

#: Elements of the largest tensor that is computed to answer one question.
LARGEST = 1 << 26

_UNINITIALIZED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


class KnownValues(compat.TorchDispatchMode):
    """While active inside a trace, operators that give Python a value (``.item()``, ``if tensor:``) give it where it
    is known; elsewhere they fail as they did."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        overload = isinstance(func, torch._ops.OpOverload)  # not one of higher order
        if overload and (torch.Tag.data_dependent_output in func.tags or func is torch.ops.aten.is_nonzero.default):
            leaves, spec = compat.pytree.tree_flatten((args, dict(kwargs)))
            histories = [history(leaf) if isinstance(leaf, torch.Tensor) else () for leaf in leaves]
            if None not in histories:
                values = [_computed(h) if h else leaf for h, leaf in zip(histories, leaves, strict=True)]
                args, kwargs = compat.pytree.tree_unflatten(values, spec)
                with compat.without_modes(), torch.no_grad():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor of the running trace follow from literals."""
    return history(tensor) is not None


def history(tensor: torch.Tensor) -> list[fx.Node] | None:
    """The nodes that the values of ``tensor`` follow from, in order; None if they are not known."""
    node = compat.node_of_trace(tensor)
    if node is None:
        return None
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        if not _computable(node):
            return None
        found.add(node)
        pending.extend(node.all_input_nodes)
    return None if _written(found) else sorted(found)


def _computable(node: fx.Node) -> bool:
    """Whether the node gives the same values in every step, as far as its inputs do."""
    if node.op == "get_attr":
        return not compat.is_fake(compat.constant_of_trace(node.target))
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    target, values = node.target, compat.pytree.tree_leaves(node.meta.get("val"))
    return (
        target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and target.overloadpacket.__name__ not in _UNINITIALIZED
        and all(isinstance(value, torch.Tensor) and value.numel() <= LARGEST for value in values)
    )


def _written(nodes: set[fx.Node]) -> bool:
    """Whether any operator wrote to the memory of one of ``nodes``, directly or by a view."""
    seen, pending = set(nodes), list(nodes)
    while pending:
        node = pending.pop()
        for user in node.users:
            if not isinstance(user.target, torch._ops.OpOverload):
                views = user.target is operator.getitem
            else:
                schema = user.target._schema
                given = dict(zip((a.name for a in schema.arguments), user.args, strict=False)) | user.kwargs
                written = [given.get(a.name) for a in schema.arguments if a.is_write]
                if node in compat.pytree.tree_leaves(written):
                    return True
                views = any(result.alias_info is not None for result in schema.returns)
            if views and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _computed(nodes: Sequence[fx.Node]) -> torch.Tensor:
    """The value of the last of ``nodes``, on the CPU."""
    values = {node: compat.constant_of_trace(node.target) for node in nodes if node.op == "get_attr"}
    with compat.without_modes(), torch.no_grad():
        values = {node: constant.cpu() for node, constant in values.items()}
        for node in nodes:
            if node not in values:
                arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                args, kwargs = compat.pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), arguments)
                values[node] = node.target(*args, **kwargs)
    return values[nodes[-1]]

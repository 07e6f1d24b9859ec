"""Known values: those that follow from literals alone, such as positions by ``arange``, which Python may read.

A step is traced without values, so ``if (positions.diff() != 1).any():`` has no answer in general. It has one if the
tensor depends on no input of the step: its nodes are then computed on the CPU when Python asks for the value. Python
so takes the same branch as in eager: Hugging Face models, for example, leave out an attention mask that says no more
than "causal".

Unknown are the values of random and uninitialized tensors, of those that an operator wrote to in place, of those that
exist outside the step and may change there, and of those larger than `LARGEST`.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph import compat

aten = torch.ops.aten

#: Elements of the largest tensor that is computed for a value.
LARGEST = 1 << 24

#: Elements of the largest tensor that is kept for the next value.
_KEPT = 1 << 16

_UNINITIALIZED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")

#: Higher-order operators that go by a value, or whose bodies a graph would hold apart, out of sight of passes.
_CONTROL_FLOW = ("cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl")

#: These read only the shape of their tensor argument.
_SHAPED = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")


class KnownValues(compat.TorchDispatchMode):
    """While active inside a trace, operators that give Python a value (``.item()``, ``if tensor:``) give known values;
    for others they fail as before. One per trace."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[fx.Node, Any] = {}
        self._written: set[int] = set()  # storages

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], compat.FakeTensor):
            # Autograd asks for devices twice as often as it calls operators. Where the mode of fake tensors, below all
            # others, answers, that takes an eighth of a trace.
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator: it may write to its arguments
            if func.name() in _CONTROL_FLOW:
                raise compat.DataDependentOutputException(func.name())
            self.note_writes((args, kwargs))
        elif func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
            self.note_writes([given.get(a.name) for a in arguments if a.is_write])
        elif torch.Tag.data_dependent_output in func.tags or func is aten.is_nonzero.default:
            decided = _decided(compat.node_of_trace(args[0])) if isinstance(args[0], torch.Tensor) else None
            if decided is not None:
                return decided
            leaves, spec = compat.pytree.tree_flatten((args, kwargs))
            if all(self.knows(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
                values = [self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                args, kwargs = compat.pytree.tree_unflatten(values, spec)
                with compat.without_modes(), torch.no_grad():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor of the running trace follow from literals."""
        node = compat.node_of_trace(tensor)
        return node is not None and self._history(node) is not None

    def note_writes(self, arguments: Any) -> None:
        """The values of the tensors among ``arguments`` are not known from here on."""
        pending = [leaf for leaf in compat.pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        for tensor in pending:
            if compat.is_traceable_wrapper_subclass(tensor):
                pending += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            else:
                self._written.add(compat.storage_key(tensor))

    def _history(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes to compute for the value of ``node``, in order; None if it is not known."""
        found: set[fx.Node] = set()
        pending = [node]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            made = node.meta.get("val")  # for a list: its elements are nodes of their own
            if isinstance(made, torch.Tensor) and compat.storage_key(made) in self._written:
                return None
            if node not in self._values:
                if not _computable(node):
                    return None
                pending += _sources(node)
            found.add(node)
        return sorted(found)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a known ``tensor``, on the CPU."""
        wanted = compat.node_of_trace(tensor)
        history = self._history(wanted)
        values = {node: self._values[node] for node in history if node in self._values}
        values |= {node: compat.constant_of_trace(node.target) for node in history if node.op == "get_attr"}
        uses = Counter(source for node in history if node not in values for source in _sources(node))
        with compat.without_modes(), torch.no_grad():
            for node in history:
                if node not in values:
                    values[node] = made = _computed(node, values)
                    if sum(t.numel() for t in compat.pytree.tree_leaves(made)) <= _KEPT:
                        self._values[node] = made
                    for source in _sources(node):
                        uses[source] -= 1
                        if not uses[source]:
                            del values[source]
        return values[wanted]


def _decided(node: fx.Node | None) -> bool | None:
    """What a comparison of a number drawn from [0, 1) says whatever was drawn, as LayerDrop's with 0; else None."""
    if node is None or len(node.args) != 2 or not isinstance(node.args[1], int | float):
        return None
    drawn, bound = node.args
    if not isinstance(drawn, fx.Node) or drawn.target is not aten.rand.default:
        return None
    below, above = bound <= 0, bound >= 1  # no number, every number is below the bound
    answers = {aten.lt.Scalar: above, aten.ge.Scalar: below, aten.le.Scalar: above, aten.gt.Scalar: bound < 0}
    opposite = {aten.lt.Scalar: below, aten.ge.Scalar: above, aten.le.Scalar: bound < 0, aten.gt.Scalar: above}
    if node.target not in answers or not (answers[node.target] or opposite[node.target]):
        return None
    return answers[node.target]


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values matter to ``node``."""
    return [] if _packet(node) in _SHAPED else node.all_input_nodes


def _packet(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def _computable(node: fx.Node) -> bool:
    """Whether the node gives the same values in every step if its inputs do."""
    if node.op == "get_attr":  # a literal; other constants existed before the trace and may change between steps
        literal = all(user.target is aten.lift_fresh_copy.default for user in node.users)
        return literal and compat.constant_of_trace(node.target).untyped_storage().resizable()  # not NumPy's memory
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    target, values = node.target, compat.pytree.tree_leaves(node.meta.get("val"))
    return (
        target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and _packet(node) not in _UNINITIALIZED
        and all(isinstance(v, torch.Tensor) and v.numel() <= LARGEST and v.device.type != "meta" for v in values)
    )


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The value of ``node`` from those of its sources, on the CPU."""

    def value(source: fx.Node) -> Any:
        if source in values:
            return compat.pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values[source])
        like = source.meta["val"]  # only its shape matters
        return torch.empty((), dtype=like.dtype).expand(like.shape)

    arguments = fx.map_arg((node.args, node.kwargs), value)
    args, kwargs = compat.pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), arguments)
    return node.target(*args, **kwargs)

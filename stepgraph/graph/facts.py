"""Questions about one node: what it calls, what that does, and its neighbours."""

import operator
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import fx

from stepgraph.graph.launch import Launch
from stepgraph.kernels import attention, concat, fp8, gelu, gelu_rows, gram, products  # noqa: F401  (they define operators)
from stepgraph.kernels.comm import expert_rows  # noqa: F401
from stepgraph.kernels.lora import sums  # noqa: F401
from stepgraph.kernels.loss import counted  # noqa: F401
from stepgraph.kernels.moe import grouped  # noqa: F401
from stepgraph.kernels.norm import modulated  # noqa: F401
from stepgraph.kernels.quant import nf4  # noqa: F401

OpOverload = torch._ops.OpOverload
aten, ours = torch.ops.aten, torch.ops.stepgraph
T = TypeVar("T")
higher_order = torch.ops.higher_order

#: Key in the metadata of a constant that is a `literal`.
LITERAL = "literal"

#: Share their argument's storage although their schema does not say so.
_HIDDEN_VIEWS = {
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}

#: Write into arguments although their schema does not say so: the positions of running mean and variance.
HIDDEN_WRITES = {
    **dict.fromkeys((aten.native_batch_norm.default, aten.cudnn_batch_norm.default), (3, 4)),
    **dict.fromkeys((aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default), (3, 4)),
    aten.batch_norm_update_stats.default: (1, 2),
}
#: Where the flag is by which they do.
TRAINING = 5

#: Higher-order operators that only compute.
_PURE_HIGHER_ORDER = {higher_order.flex_attention, higher_order.flex_attention_backward}

#: Operators of ours that only compute.
_PURE = {
    ours.gelu_product.default, ours.gelu_product_backward.default,
    ours.cast_scaled.default, ours.cast_scaled_rows.default, ours.scaled_product.default,
    ours.sort_by_expert.default, ours.gather_rows.default, ours.combine_rows.default,
    ours.combine_rows_backward.default, ours.grouped_mm.default, ours.grouped_mm_weight.default,
    ours.swiglu_rows.default, ours.swiglu_rows_backward.default, ours.expert_places.default,
    ours.flash4_attention.default, ours.flash4_attention_backward.default, ours.dequantize_4bit.default,
    ours.sum_products.default, ours.grouped_scaled_mm.default, ours.grouped_scaled_mm_weight.default,
    ours.cast_scaled_groups.default, ours.cast_packed_rows.default,
    ours.swiglu_rows_cast.default, ours.swiglu_rows_cast_backward.default, ours.product.default,
    ours.modulated_norm_backward.default, ours.gated_norm_backward.default, ours.gelu_rows.default,
    ours.gelu_rows_backward.default, ours.gram.default, ours.transposed_bytes.default,
    ours.counted_logits.default, ours.counted_dx.default, ours.counted_db.default,
    ours.gated_adapters.default, ours.gated_adapters_backward.default,
}  # fmt: skip

#: Operators that dominate a step's arithmetic.
EXPENSIVE = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.convolution, aten._scaled_mm, aten._grouped_mm,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_attention_math, aten._flash_attention_forward, aten.sort, aten.topk,
    ours.grouped_mm, ours.grouped_mm_weight, ours.scaled_product, ours.flash4_attention, ours.sum_products,
    ours.grouped_scaled_mm, ours.grouped_scaled_mm_weight, ours.product, ours.gelu_product, ours.gelu_product_backward,
    ours.gram, ours.counted_logits, ours.counted_dx, ours.counted_dw_, ours.gated_adapters,
}  # fmt: skip


# Facts of operators are asked for at every node of a graph by most passes, and schemas are slow to read.


def of_target(fact: Callable[[Any], T]) -> Callable[[Any], T]:
    """``fact`` of the operators that nodes call, computed once each; found by address, because operators hash in
    Python."""
    known: dict[int, tuple[Any, T]] = {}

    def look_up(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = target, fact(target)
            if isinstance(target, OpOverload):  # which lives on at its address; a launch holds tensors
                known[id(target)] = found
        return found[1]

    return look_up


@of_target
def _draws(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


@of_target
def writes(target: Any) -> bool:
    """Whether the operator writes into one of its arguments."""
    operator = isinstance(target, OpOverload)
    return isinstance(target, Launch) or (operator and (target._schema.is_mutable or target in HIDDEN_WRITES))


@of_target
def returns_view(target: Any) -> bool:
    """Whether the operator gives back storage of its first argument without writing to it."""
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    shares = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return shares or target in _HIDDEN_VIEWS


# What it calls


def is_overload(node: fx.Node) -> bool:
    """Whether the node calls a torch operator (not a higher-order one, not getitem)."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_launch(node: fx.Node) -> bool:
    """Whether the node launches a Triton kernel of the model's own."""
    return isinstance(node.target, Launch)


def packet(node: fx.Node) -> object:
    """The operator whatever its overload; None for anything but an operator."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def argument(node: fx.Node, name: str) -> Any:
    """What the operator call passes as ``name``, its default if nothing; None where there is no such argument."""
    for i, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, parameter.default_value)
    return None


def set_argument(node: fx.Node, name: str, value: object) -> None:
    """Let the operator call pass ``value`` as its argument ``name``."""
    place = [parameter.name for parameter in node.target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def leaves_rest(node: fx.Node) -> bool:
    """Whether rows of the result hold anything, which nothing reads (`stepgraph.passes.moe.unread`)."""
    return node.kwargs.get("zero_rest") is False


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random generator. Attention does only where its dropout is not zero."""
    return is_overload(node) and _draws(node.target) and argument(node, "dropout_p") != 0


def has_generator(node: fx.Node) -> bool:
    """Whether the node draws from a generator that the model gives it, not from the default one of its device."""
    return node.op == "call_function" and node.kwargs.get("generator") is not None


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return node.op == "call_function" and writes(node.target)


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares storage with its first argument without writing to it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return returns_view(node.target)


def is_pure(node: fx.Node) -> bool:
    """Whether the node may be removed when unused, or run again for the same result."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_random(node) or is_mutating(node):
        return False
    if is_overload(node):
        # An operator that returns nothing runs for its effect, as an assertion does.
        known = node.target.namespace in ("aten", "prims") or node.target in _PURE
        return known and bool(node.target._schema.returns)
    return node.target is operator.getitem or node.target in _PURE_HIGHER_ORDER


def literal(node: fx.Node) -> torch.Tensor | None:
    """The value of a constant that is a literal of the model and never changes. None for other nodes: a tensor that the
    user holds is a constant of the graph too, and is read live."""
    return getattr(node.graph.owning_module, node.target) if node.meta.get(LITERAL) else None


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each element of its result from the elements at its place in the inputs: casts do,
    views compute nothing."""
    if not is_overload(node) or is_view(node):
        return False
    return torch.Tag.pointwise in node.target.tags or packet(node) is aten._to_copy


# Casts


def is_cast(node: fx.Node) -> bool:
    """Whether the node casts a floating-point tensor to a floating-point dtype (see `stays_float`)."""
    return packet(node) is aten._to_copy and stays_float(node)


def stays_float(node: fx.Node) -> bool:
    """Whether the node makes a floating-point tensor of one on the same device.

    Eight bits do not count: going there is no cast but a quantization, whose rounding is meant.
    """
    made, read = node.meta["val"], node.args[0].meta["val"]
    return made.device == read.device and all(t.is_floating_point() and t.dtype.itemsize > 1 for t in (made, read))


def casts_of(node: fx.Node) -> list[fx.Node]:
    """The casts that ``node`` is the last of, the last first; none where it is not a cast."""
    casts = []
    while is_cast(node):
        casts.append(node)
        node = node.args[0]
    return casts


def without_casts(node: fx.Node) -> fx.Node:
    """What ``node`` was before all casts."""
    casts = casts_of(node)
    return casts[-1].args[0] if casts else node


def cast_behind(node: fx.Node) -> fx.Node | None:
    """The cast that is the only reader of ``node``, if any."""
    user = only_user(node)
    return user if user is not None and is_cast(user) else None


# Its neighbours


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads ``node``, if there is one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def getitem_users(node: fx.Node) -> dict[int, fx.Node]:
    """The getitem nodes that take ``node``'s outputs apart, by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}


def other_input(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """The tensor that ``node``, an operator of two, reads besides ``one``; None where there is none."""
    others = [operand for operand in node.args[:2] if operand is not one]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def factor_of(node: fx.Node) -> float | None:
    """The number, not 0, that ``node`` multiplies a tensor by."""
    if packet(node) not in (aten.mul, aten.div) or node.kwargs or not isinstance(node.args[1], (int, float)):
        return None
    number = float(node.args[1])
    return (number if packet(node) is aten.mul else 1 / number) if number else None


#: Views that keep all elements in their order.
RESHAPES = (aten.view.default, aten._unsafe_view.default)


def behind_reshapes(node: fx.Node, *others: Callable) -> fx.Node:
    """What ``node`` is in another shape, or itself; also what ``others`` made of it."""
    while node.target in (*RESHAPES, *others):
        node = node.args[0]
    return node


def swapped(node: fx.Node) -> fx.Node | None:
    """What ``node`` is with its last two dimensions swapped; None where it is nothing of the kind."""
    if node.target is aten.t.default:
        return node.args[0]
    if packet(node) not in (aten.transpose, aten.permute):
        return None
    rank = node.meta["val"].ndim
    return node.args[0] if permutation(node) == [*range(rank - 2), rank - 1, rank - 2] else None


def permutation(node: fx.Node) -> list[int]:
    """The dimensions that ``node``, a permute or transpose, puts in each place."""
    order = list(range(node.meta["val"].ndim))
    if packet(node) is aten.permute:
        return [d % len(order) for d in node.args[1]]
    a, b = (d % len(order) for d in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def is_zeros(node: fx.Node) -> bool:
    """Whether the node makes a tensor of zeros, which nothing writes to."""
    zeros = node.target in (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
    zeros = zeros or (node.target in (aten.full.default, aten.new_full.default) and node.args[-1] == 0)
    return zeros and not any(is_mutating(user) or is_view(user) for user in node.users)


def upstream(node: fx.Node, given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Everything that ``node`` is made from; not what the nodes ``given`` are made from."""
    seen: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue += () if current in given else current.all_input_nodes
    return seen


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the tensor or tensors that ``node`` produces."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    values = value if isinstance(value, (list, tuple)) else ()
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))

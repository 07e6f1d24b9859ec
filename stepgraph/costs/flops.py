"""Floating-point operations of a node."""

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from stepgraph.graph.facts import argument, is_overload, of_target
from stepgraph.graph.marks import VISIBLE_PAIRS

aten = torch.ops.aten
higher_order = torch.ops.higher_order

#: Matrix products of attention over (T, T, head_dim): those as wide as queries and keys, those as wide as values. Flash
#: attention's backward computes the scores again. Source: Dao et al., "FlashAttention", 2022, section 3.
FORWARD, BACKWARD = (1, 1), (3, 2)

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: FORWARD,
    aten._scaled_dot_product_flash_attention.default: FORWARD,
    aten._scaled_dot_product_cudnn_attention.default: FORWARD,
    aten._scaled_dot_product_efficient_attention.default: FORWARD,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: BACKWARD,
    aten._scaled_dot_product_flash_attention_backward.default: BACKWARD,
    aten._scaled_dot_product_cudnn_attention_backward.default: BACKWARD,
    aten._scaled_dot_product_efficient_attention_backward.default: BACKWARD,
    torch.ops.stepgraph.flash4_attention.default: FORWARD,
    torch.ops.stepgraph.flash4_attention_backward.default: BACKWARD,
}

#: The same for FlashAttention with a window, which takes (B, T, H, head_dim) of one width.
_WINDOWED = {aten._flash_attention_forward.default: FORWARD, aten._flash_attention_backward.default: BACKWARD}

#: The same within documents of a packed sequence, which takes (T, H, head_dim).
_DOCUMENTS = {
    torch.ops.stepgraph.document_attention.default: FORWARD,
    torch.ops.stepgraph.document_attention_backward.default: BACKWARD,
}

#: The same for FlexAttention, which takes q, k and v first in both directions.
_FLEX_ATTENTION = {higher_order.flex_attention: FORWARD, higher_order.flex_attention_backward: BACKWARD}

_FP8 = {
    getattr(torch.ops.stepgraph, name).default
    for name in ("scaled_product", "grouped_scaled_mm", "grouped_scaled_mm_weight")
}

#: What is counted here, not by torch.
_COUNTED = {*_ATTENTION, *_WINDOWED, *_DOCUMENTS, aten._grouped_mm.default}
_attends = of_target({*_ATTENTION, *_WINDOWED, *_FLEX_ATTENTION, *_DOCUMENTS}.__contains__)
_multiplies_fp8 = of_target(_FP8.__contains__)


@of_target
def _multiplies(target: torch._ops.OpOverload) -> bool:
    return target.overloadpacket in flop_registry or target in _COUNTED


def flops(node: fx.Node) -> int:
    """Floating-point operations of matrix products and attention that ``node`` runs, 0 for others. Products of experts'
    rows count every row.

    Causal attention runs half of its scores, and a window those inside it; FlexAttention that the model calls itself
    counts all of them, because its mask is not known.
    """
    if not is_overload(node):
        if node.target not in _FLEX_ATTENTION:
            return 0
        q, k, v = (n.meta["val"] for n in node.args[:3])
        pairs = q.shape[0] * q.shape[1] * node.meta.get(VISIBLE_PAIRS, q.shape[2] * k.shape[2])
        return attention_flops(_FLEX_ATTENTION[node.target], pairs, q.shape[3], v.shape[3])
    if not _multiplies(node.target):
        return 0
    count = flop_registry.get(node.target.overloadpacket)
    values = fx.map_arg(node.args, lambda n: n.meta["val"])
    if node.target in _ATTENTION:
        kinds = _ATTENTION[node.target]
        first = 0 if kinds == FORWARD else 1  # backward takes the output's gradient first
        products = _products(kinds, *values[first : first + 3])
        return products // (2 if argument(node, "is_causal") else 1)
    if node.target in _WINDOWED:
        q = argument(node, "query").meta["val"]
        sides = (argument(node, f"window_size_{side}") for side in ("left", "right"))
        return sum(_WINDOWED[node.target]) * 2 * q.shape[0] * q.shape[2] * q.shape[3] * _visible(q.shape[1], *sides)
    if node.target in _DOCUMENTS:  # as if every document were the longest: the lengths are on the device
        (T, H, d), longest = argument(node, "query").meta["val"].shape, argument(node, "longest")
        # The queries of a rank that shares a sequence see half of all keys on average.
        keys = argument(node, "key_longest") or min(longest, T)
        products = attention_flops(_DOCUMENTS[node.target], H * T * keys, d, d)
        return products // (2 if argument(node, "causal") else 1)
    if node.target is aten._grouped_mm.default:
        return 2 * values[0].numel() * node.meta["val"].shape[-1]
    return count(*values, out_val=node.meta["val"])


def is_attention(node: fx.Node) -> bool:
    """Whether the node is attention, forward or backward."""
    return _attends(node.target)


def is_fp8(node: fx.Node) -> bool:
    """Whether the node multiplies in fp8."""
    return _multiplies_fp8(node.target)


def _products(kinds: tuple[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """FLOPs of ``kinds`` products for ``q`` (B, H, T, d), ``k`` (B, H_kv, S, d) and ``v`` (B, H_kv, S, d_v)."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return attention_flops(kinds, pairs, q.shape[3], v.shape[3])


def attention_flops(kinds: tuple[int, int], pairs: int, width: int, value_width: int) -> int:
    """FLOPs of ``kinds`` products (`FORWARD` or `BACKWARD`) over ``pairs`` of a query and a key: the number of products
    as wide as queries and keys, and of products as wide as values."""
    return 2 * pairs * (kinds[0] * width + kinds[1] * value_width)


def _visible(length: int, left: int | None, right: int | None) -> int:
    """Pairs of a query and a key in a window of ``left`` keys before and ``right`` after each of ``length`` queries.

    None or a negative number: no bound on that side.
    """
    hidden = 0
    for side in (left, right):
        beyond = 0 if side is None or side < 0 else max(length - 1 - side, 0)
        hidden += beyond * (beyond + 1) // 2
    return length * length - hidden

"""The nodes of one attention in the graph, forward and backward together, whichever operator it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph.graph.facts import argument, getitem_users

aten = torch.ops.aten

#: Forward -> its backward.
BACKWARD = {
    aten._scaled_dot_product_cudnn_attention.default: aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention.default: aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default: aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
}


@dataclass
class Attention:
    """The nodes of one attention: ``forward``, and the ``backwards`` that read its results."""

    forward: fx.Node
    backwards: list[fx.Node]

    @property
    def mask(self) -> fx.Node | None:
        """What is added to its scores."""
        return mask_of(self.forward)


def attention_of(forward: fx.Node) -> Attention | str:
    """The attention of ``forward``, or why it cannot be rewritten."""
    backwards = {u for result in forward.users for u in result.users if u.target is BACKWARD[forward.target]}
    rest = {i: set(n.users) - backwards for i, n in getitem_users(forward).items() if i}
    if any(rest.values()) or any(mask_of(b) is not mask_of(forward) for b in backwards):
        return "its results are read elsewhere"
    if any(users.users for b in backwards for i, users in getitem_users(b).items() if i > 2):
        return "its mask has a gradient"
    if argument(forward, "dropout_p"):
        return "it has dropout"
    shapes = [argument(forward, name).meta["val"].shape for name in ("query", "key", "value")]
    if any(n.meta["val"].shape != shapes[i] for b in backwards for i, n in getitem_users(b).items() if i < 3):
        return "its gradients are those of repeated keys"
    return Attention(forward, sorted(backwards))


def mask_of(node: fx.Node) -> Any:
    """The mask that an operator of attention gets."""
    return argument(node, "attn_mask" if "for_cpu" in str(node.target) else "attn_bias")


def odd_scale(node: fx.Node) -> str | None:
    """Why no other kernel than FlexAttention can be trusted with the scale of the attention ``node``, or None.

    FlashAttention multiplies after it has subtracted the greatest score: a negative scale overflows, and 0 times the
    -inf of a hidden key is NaN.
    """
    scale = argument(node, "scale")
    return None if scale is None or scale > 0 else f"its scores are multiplied by {scale}, which is not positive"


def copied_from(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a copy of, by ``clone`` or by ``cat`` with empty tensors; None if it is none."""
    current = node
    while True:
        if current.target is aten.clone.default:
            current = current.args[0]
            continue
        parts = current.args[0] if current.target is aten.cat.default else []
        whole = [part for part in parts if part.meta["val"].numel()]
        if len(whole) != 1 or whole[0].meta["val"].dtype != node.meta["val"].dtype:
            return None if current is node else current
        current = whole[0]

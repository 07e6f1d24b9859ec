"""Attention over a band of keys by kernels that skip the others.

Matches: fused attention (cuDNN's or the memory-efficient one) with an additive mask that the graph determines, as
models with sliding windows build it from ``arange``, and its backward. Before -> after:

    attention(q, k, v, mask)        a window: ``_flash_attention_forward(q, k, v, window_size_left, window_size_right)``
                                    causal: attention(q, k, v, is_causal=True)
                                    everything visible, as under T5's zeros, of any number of keys: attention(q, k, v)

A mask costs the whole square of scores: 0.29 + 0.75 ms forward and backward for 16 x 16 heads x 1,024 x 64 with 129
keys visible to each query on an H100, against 0.16 + 0.52 ms for the square without a mask.
Tier numerics: another kernel sums in another order. Preconditions: a CUDA GPU with FlashAttention 2 (bf16 or fp16,
heads of at most 256 channels, a multiple of 8), no dropout, no gradient of the mask.
Source: Dao, "FlashAttention-2", 2023, in torch; windows as in Beltagy et al., "Longformer", 2020.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.edit import Builder, erase_unread, take_place
from stepgraph.graph.facts import argument, getitem_users, set_argument
from stepgraph.passes.attention.mask import Band, Masks
from stepgraph.passes.attention.nodes import Attention, attention_of, odd_scale
from stepgraph.passes.contract import PassReport, StepGraph, register

aten = torch.ops.aten

#: Operators that take a mask.
_MASKED = (aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_efficient_attention.default)
_MAX_CHANNELS = 256  # of FlashAttention 2


@register(
    "attention_windows",
    "numerics",
    needs_cuda=True,
    from_options=lambda options: None if options.attention in ("eager", "flex") else {},  # flex takes windows itself
)
def attention_windows(step: StepGraph, options: object, report: PassReport) -> None:
    """Run attention under a sliding-window mask by kernels that skip what the mask hides."""
    masks = Masks(step.graph)
    windows = dropped = 0
    for node in [n for n in step.graph.nodes if n.target in _MASKED and argument(n, "attn_bias") is not None]:
        found = _find(node, masks)
        if not report.takes(found, node):
            continue
        if found.band.sees_all or found.band.is_causal:
            found.drop_mask()
            dropped += 1
        else:
            found.rewrite()
            windows += 1
    report.summary = (
        f"{windows} of {report.matched} masked attentions as windows, {dropped} as causal or without a mask"
    )


@dataclass
class _Windowed(Attention):
    """An attention, and what its mask leaves."""

    band: Band

    def drop_mask(self) -> None:
        """Leave the mask out, and say ``is_causal`` instead."""
        for node in (self.forward, *self.backwards):
            mask = argument(node, "attn_bias")
            set_argument(node, "attn_bias", None)
            set_argument(node, "is_causal", self.band.is_causal)
            erase_unread(mask)

    def rewrite(self) -> None:
        """Put FlashAttention in the place of all of them."""
        forward, scale = self.forward, argument(self.forward, "scale")
        q, k, v = (argument(forward, name) for name in ("query", "key", "value"))
        length = q.meta["val"].shape[2]
        build = Builder(forward, before=forward)
        q, k, v = (build(aten.transpose.int, x, 1, 2) for x in (q, k, v))
        window = {
            "scale": scale,
            "window_size_left": _size(self.band.left),
            "window_size_right": _size(self.band.right),
        }
        flash = build(
            aten._flash_attention_forward.default, q, k, v, None, None, length, length, 0.0, False, False, **window
        )
        out, log_sum, seed, offset = build.parts(flash, 0, 1, 2, 3)
        for backward in self.backwards:
            build = Builder(backward, before=backward)
            grad = build(aten.transpose.int, backward.args[0], 1, 2)
            grads = build(
                aten._flash_attention_backward.default,
                grad, q, k, v, out, log_sum, None, None, length, length, 0.0, False, seed, offset, **window,
            )  # fmt: skip
            for i, old in getitem_users(backward).items():
                if i < 3:
                    build = Builder(old, before=old)
                    take_place(old, build(aten.transpose.int, build(operator.getitem, grads, i), 1, 2))
            erase_unread(*getitem_users(backward).values())
        old = getitem_users(forward)[0]
        take_place(old, Builder(old, before=old)(aten.transpose.int, out, 1, 2))
        erase_unread(*getitem_users(forward).values())


def _find(forward: fx.Node, masks: Masks) -> _Windowed | str:
    """The attention of ``forward``, or why it cannot be rewritten."""
    found = attention_of(forward)
    if isinstance(found, str):
        return found
    if argument(forward, "is_causal"):
        return "it is causal and has a mask"
    q, k = (argument(forward, name).meta["val"] for name in ("query", "key"))
    band = masks.band(found.mask)
    if isinstance(band, str):
        return band
    if not (band.sees_all or band.is_causal):
        channels = {argument(forward, name).meta["val"].shape[-1] for name in ("query", "key", "value")}
        if odd := odd_scale(forward):
            return odd
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"no kernel for windows in {q.dtype}"
        if len(channels) > 1 or (width := channels.pop()) > _MAX_CHANNELS or width % 8:
            return f"no kernel for windows with {q.shape[-1]} channels a head"
    if q.shape[2] != k.shape[2] and not band.sees_all:
        return "queries and keys differ in number"
    return _Windowed(forward, found.backwards, band)


def _size(side: int | None) -> int:
    """A side of a window as the operator takes it."""
    return -1 if side is None else side

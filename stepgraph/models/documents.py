"""Attention within the documents of a packed row, given by the positions of its tokens; also over ranks.

``positions`` (B, T) int64 begin at 0 with each document, and a row begins with one: query ``i`` sees the keys
``i - positions[i]`` to ``i``. So they alone are enough, for masks and for rotations.

Where ranks share sequences, `stepgraph.parallel.parallelize` sets ``context``, a `Context`, of a decoder and of each of
its attentions. Each rank then works on its own tokens; attention sees all.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

#: Added to a score it leaves exp() = 0 in fp32. Not -inf, of which cuDNN makes NaN: it is what torch gives it too.
HIDDEN = torch.finfo(torch.float16).min


def document_mask(
    positions: torch.Tensor, dtype: torch.dtype, place: torch.Tensor | None = None, keys: int | None = None
) -> torch.Tensor:
    """(B, 1, T, T), added to the scores (B, H, T, T): 0 where a query sees a key, else what leaves it no weight.

    With ``place`` (t,): of queries that are the tokens there of ``keys`` tokens, with ``positions`` (B, t).

    It takes ``B * T * T`` elements once, for all layers and heads: made in the dtype that attention computes in, which
    is ``dtype`` or that of autocast, so that no layer makes it again.
    """
    device = positions.device
    dtype = computed_in(dtype, device)
    key = torch.arange(keys or positions.shape[1], device=device)
    place = key if place is None else place
    first = (place - positions).unsqueeze(2)  # (B, T, 1): the key that begins the query's document
    seen = (first <= key) & (key <= place.unsqueeze(1))  # (B, T, T)
    return torch.zeros((), dtype=dtype, device=device).where(seen, HIDDEN).unsqueeze(1)


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of attention in a stream of ``dtype``: that of autocast where it is enabled."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def attend_within(
    q: torch.Tensor,  # (B, H, T, d)
    k: torch.Tensor,  # (B, H_kv, T, d): each head is shared by H / H_kv heads of queries
    v: torch.Tensor,  # (B, H_kv, T, d_v)
    mask: torch.Tensor,  # of `document_mask`
    scale: float | None = None,  # of the scores; None: d ** -0.5
) -> torch.Tensor:  # (B, H, T, d_v)
    """Attention of each token to the tokens of its document, up to itself."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:  # repeated, as the memory-efficient kernel, which takes a mask, knows no groups of heads
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def check_positions(positions: torch.Tensor, tokens: torch.Tensor, cache: object | None) -> None:
    """Raise ``ValueError`` for positions of another shape than ``tokens``, or given with a ``cache``."""
    if positions.shape != tokens.shape:
        raise ValueError(
            f"positions are {tuple(positions.shape)} and tokens {tuple(tokens.shape)}; use one for each token"
        )
    if cache is not None:
        raise ValueError("a cache holds one text, and positions are for packed documents; use one of the two")


#: The buffer of a model that says which part this rank has, a scalar int64.
PLACE = "cp_place"
#: What gives the result of queries, keys and values.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Context(Protocol):
    """Ranks that have parts of the same sequences: see `stepgraph.parallel.context`."""

    def part(self, x: torch.Tensor, place: torch.Tensor, dim: int) -> torch.Tensor:
        """The part ``place`` of ``x`` along ``dim``, the sequence."""

    def mask(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype, place: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask of :meth:`attend`, of whole ``tokens`` (B, T) or of documents at ``positions`` (B, T)."""

    def attend(
        self,
        attention: Attention,
        q: torch.Tensor,  # (B, H, T / ranks, d)
        k: torch.Tensor,  # (B, H_kv, T / ranks, d)
        v: torch.Tensor,  # (B, H_kv, T / ranks, d_v)
        mask: torch.Tensor | None,  # of `mask`
        scale: float | None = None,  # of the scores; None: d ** -0.5
    ) -> torch.Tensor:  # (B, H, T / ranks, d_v)
        """Causal attention of this rank's tokens to all tokens, by ``attention(q, k, v)`` over some of the heads, or
        over all of them with the mask."""


def own_part(model: nn.Module, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The part of ``x`` along ``dim``, the sequence, that this rank works on: all of it without a ``context``."""
    return x if model.context is None else model.context.part(x, getattr(model, PLACE), dim)


def own_mask(
    model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The mask that the blocks of ``model`` attend with, in a stream of ``dtype``; None: causal."""
    if model.context is not None:
        return model.context.mask(tokens, positions, dtype, getattr(model, PLACE))
    return None if positions is None else document_mask(positions, dtype)

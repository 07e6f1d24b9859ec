"""Where ranks share sequences: what a model asks of them.

A decoder has the attribute ``context`` and so has each of its attentions; `stepgraph.parallel.parallelize` sets both.
Each rank then works on its own part of the tokens, and its attention sees all of them.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from stepgraph.models.documents import document_mask

#: The buffer of a model that says which part this rank has, a scalar int64.
PLACE = "cp_place"


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
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        q: torch.Tensor,  # (B, H, T / ranks, d)
        k: torch.Tensor,  # (B, H_kv, T / ranks, d)
        v: torch.Tensor,  # (B, H_kv, T / ranks, d_v)
        mask: torch.Tensor | None,  # of `mask`
        scale: float | None = None,  # of the scores; None: d ** -0.5
    ) -> torch.Tensor:  # (B, H, T / ranks, d_v)
        """Causal attention of this rank's tokens to all: by ``attention(q, k, v)``, of some heads or with the mask."""


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

"""Where ranks share sequences: what a model asks of them.

A decoder has the attribute ``context`` and so has each of its attentions; `stepgraph.parallel.parallelize` sets both.
Each rank then works on its own part of the tokens, and attention on some heads of all tokens.
"""

from typing import Protocol

import torch
from torch import nn

#: The buffer of a model that says which part this rank has, a scalar int64.
PLACE = "cp_place"


class Context(Protocol):
    """Ranks that have parts of the same sequences: see `stepgraph.parallel.context`."""

    def part(self, x: torch.Tensor, place: torch.Tensor, dim: int) -> torch.Tensor:
        """The part ``place`` of ``x`` along ``dim``, the sequence."""

    def by_heads(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each (B, H, T / ranks, d), all heads of a part of the tokens -> (B, H / ranks, T, d)."""

    def by_tokens(self, y: torch.Tensor) -> torch.Tensor:
        """(B, H / ranks, T, d) -> (B, H, T / ranks, d)."""


def own_part(model: nn.Module, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The part of ``x`` along ``dim``, the sequence, that this rank works on: all of it without a ``context``."""
    return x if model.context is None else model.context.part(x, getattr(model, PLACE), dim)

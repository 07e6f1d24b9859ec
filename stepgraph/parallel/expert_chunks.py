"""Tokens of a layer of experts in chunks, each exchanged and computed separately.

While one chunk travels, the experts compute another: as the program is written nothing overlaps, and the
pass `overlap_experts` moves it so. A token's result does not depend on the chunk that it is in, but for the rounding of
products of fewer rows; gradients of the experts' weights are sums over the chunks. Weights are gathered once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepgraph.parallel.experts import ExpertExchange, expert_layers
from stepgraph.parallel.fsdp import gathered_once, own_layouts, parametrize

Parts = tuple[torch.Tensor, ...]


class ChunkedExchange:
    """``whole`` for each of ``chunks`` parts of the tokens. What the experts get and give is a tuple of parts."""

    def __init__(self, whole: ExpertExchange, chunks: int):
        self.whole, self.chunks, self.capacity = whole, chunks, whole.capacity

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int) -> tuple[Parts, Parts, tuple[Any, ...]]:
        """`ExpertExchange.dispatch` of each part of ``x`` (N, D) and ``chosen`` (N, K): rows, ends and states."""
        parts = zip(x.chunk(self.chunks), chosen.chunk(self.chunks), strict=True)
        rows, offsets, states = zip(*(self.whole.dispatch(*part, n_experts) for part in parts), strict=True)
        return rows, offsets, states

    def combine(self, rows: Parts, weights: torch.Tensor, state: tuple[Any, ...]) -> torch.Tensor:
        """`ExpertExchange.combine` of each part, together (N, D)."""
        parts = zip(rows, weights.chunk(self.chunks), state, strict=True)
        return torch.cat([self.whole.combine(*part) for part in parts])


def chunk_experts(model: nn.Module, chunks: int) -> None:
    """The layers of experts of ``model``, which is parallel, take their tokens in ``chunks`` parts."""
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"expert_chunks={chunks} must be 1 or more: 2 computes one half while the other travels")
    if chunks > 1:
        for layer in expert_layers(model):
            layer.owner.exchange = ChunkedExchange(layer.owner.exchange, chunks)
            if not layer.routed:
                parametrize(layer.experts, own_layouts(layer.experts), _each_part)


def _each_part(experts: nn.Module, forward: Callable, rows: Parts, offsets: Parts) -> Parts:
    with gathered_once(experts):
        return tuple(map(forward, rows, offsets))

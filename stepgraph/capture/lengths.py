"""A batch of another length, from which a step learns what in it depends on the length."""

from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.trace import flatten_batch

_SHORTEST = 4


def shorter(batch: Any) -> Any | None:
    """``batch`` with the second dimension (batch, length, ...) of its tensors halved; None if none is of 4 or more."""
    leaves, spec = flatten_batch(batch)
    halves = [_half(leaf) if _has_length(leaf) else leaf for leaf in leaves]
    same = all(half is leaf for half, leaf in zip(halves, leaves, strict=True))
    return None if same else compat.pytree.tree_unflatten(halves, spec)


def _has_length(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and not compat.is_traceable_wrapper_subclass(leaf)
    return plain and leaf.ndim > 1 and leaf.shape[1] >= _SHORTEST


def _half(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach()[:, : leaf.shape[1] // 2].clone(memory_format=torch.contiguous_format)

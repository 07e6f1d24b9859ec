"""A family of models as one record: everything that the other packages must know of it.

A new family is a folder here with its record, its place in `families.FAMILIES`, and its presets.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint as a part of one of ours: ``ours[region]``, with ``region`` as (start, stop) in each
    dimension. ``stacked``: theirs lacks the first dimension, of which the region has one row (one expert's weight)."""

    name: str
    region: tuple[tuple[int, int], ...]
    stacked: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor in the checkpoint."""
        return torch.Size(stop - start for start, stop in self.region[self.stacked :])


def whole_piece(name: str, shape: Sequence[int]) -> list[Piece]:
    """The one piece of a tensor that the checkpoint, too, has as one."""
    return [Piece(name, tuple((0, size) for size in shape))]


@dataclass(frozen=True)
class HuggingFace:
    """A family's checkpoints in the Hugging Face format. Its module has ``init_buffers`` for what they do not hold.

    ``title``: the model's name, for people. ``model_types``: theirs, in ``config.json``. ``name``: our tensor's name ->
    theirs. ``pieces``: name and shape of one of ours -> the tensors that it is in a checkpoint; None: one, called
    ``name``. ``read_config``: a folder -> our configuration; raises ``ValueError`` for another model.
    ``write_config``: configuration and dtype -> their ``config.json``; raises ``ValueError`` for a model that the
    format cannot express. ``free``: fields of the configuration that weights do not depend on, fields of a
    configuration in it as ``moe.balance_rate``.
    """

    title: str
    name: Callable[[str], str]
    read_config: Callable[[str | os.PathLike[str]], Any]
    write_config: Callable[[Any, torch.dtype], dict[str, Any]]
    model_types: tuple[str, ...]
    free: tuple[str, ...] = ()
    pieces: Callable[[str, Sequence[int]], list[Piece]] | None = None

    def tied(self, config: Any) -> tuple[str, str] | None:
        """Our (head, embedding) where the model ties the two, else None: some checkpoints hold the head all the
        same."""
        return ("head.weight", "embed.weight") if config.tie_embeddings else None

    def pieces_of(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """The tensors of a checkpoint that make up our tensor ``name``."""
        return whole_piece(self.name(name), shape) if self.pieces is None else self.pieces(name, shape)


@dataclass(frozen=True)
class Family:
    """One family of models.

    ``name``: as in a run's ``config.json``. ``config``: the dataclass of a model's shape, a `CountableConfig`.
    ``model``: shape -> module with ``init_weights``; it must build on the meta device too. ``tp_plan``: shape -> module
    -> style of tensor parallelism. ``tp_sizes``: fields of the shape that the number of tensor-parallel ranks must
    divide. ``longest``: shape -> its longest sequence, None for any length. ``hugging_face``: None where no checkpoints
    exist in that format.
    """

    name: str
    config: type
    model: Callable[[Any], nn.Module]
    tp_plan: Callable[[Any], Mapping[str, str]]
    tp_sizes: tuple[str, ...]
    longest: Callable[[Any], int | None] = lambda config: None
    hugging_face: HuggingFace | None = None

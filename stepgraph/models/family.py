"""A family of models as one record, with everything that other packages need.

A new family is a module here with its record, its place in `stepgraph.models.FAMILIES`, and its presets.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """The single piece of a tensor that the checkpoint also stores as one."""
    return [Piece(name, tuple((0, size) for size in shape))]


@dataclass(frozen=True)
class HuggingFace:
    """A family's checkpoints in the Hugging Face format. Its module has ``init_buffers`` for the buffers they lack.

    ``title``: the model's name, for people. ``model_types``: theirs, in ``config.json``. ``name``: our tensor's name ->
    theirs. ``read_config``: a folder -> our configuration; raises ``ValueError`` for another model. ``write_config``:
    configuration and dtype -> their ``config.json``; raises ``ValueError`` for a model that the format cannot express.
    ``free``: fields of the configuration that weights do not depend on, nested ones as ``moe.balance_rate``.
    """

    title: str
    name: Callable[[str], str]
    read_config: Callable[[str | os.PathLike[str]], Any]
    write_config: Callable[[Any, torch.dtype], dict[str, Any]]
    model_types: tuple[str, ...]
    free: tuple[str, ...] = ()

    def tied(self, config: Any) -> tuple[str, str] | None:
        """Our (head, embedding) where the model ties the two, else None: some checkpoints hold the head too."""
        return ("head.weight", "embed.weight") if config.tie_embeddings else None

    def pieces_of(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """The tensors of a checkpoint that make up our tensor ``name``: one, except for experts, which ours stack. Of
        ``experts.gate_up_proj.weight`` (E, 2 F, D) they are ``experts.0.gate_proj.weight`` (F, D),
        ``experts.0.up_proj.weight``, ``experts.1.gate_proj.weight`` and so on."""
        before, experts, product = self.name(name).partition(".experts.")
        if not experts:
            return whole_piece(self.name(name), shape)
        n_experts, rows, width = shape
        parts = {product: (0, rows)}
        if product == "gate_up_proj.weight":
            parts = {"gate_proj.weight": (0, rows // 2), "up_proj.weight": (rows // 2, rows)}
        return [
            Piece(f"{before}.experts.{e}.{part}", ((e, e + 1), span, (0, width)), stacked=True)
            for e in range(n_experts)
            for part, span in parts.items()
        ]


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


class CountableConfig(Protocol):
    """The part of a model configuration that its FLOP count needs."""

    @property
    def n_layers(self) -> int: ...

    @property
    def score_flops(self) -> int: ...

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int: ...


def num_params(model: nn.Module) -> int:
    """Number of parameters of ``model``, each tied one counted once; ``model`` may be on the meta device."""
    return sum(param.numel() for param in model.parameters())


def flops_per_token(config: CountableConfig, seq_len: int) -> int:
    """Training FLOPs (forward and backward) per token at sequences of ``seq_len``: ``6 N + 6 n_layers H (d_qk + d_v)
    seq_len``.

    ``N`` counts every parameter that multiplies a token: the output head is in, an embedding table that is only looked
    up is out, and a tied table is in once, as the head; of routed experts as many as a token goes to, the shared ones
    and the router. In the attention term ``H`` heads multiply queries with keys of ``d_qk`` elements and scores with
    values of ``d_v`` (in latent attention they differ), with ``d_qk = d_v = dim / H`` ``12 n_layers dim seq_len``. It
    counts the full ``seq_len x seq_len`` scores, although a causal kernel may skip half, and no recomputation.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} is not positive; use a value above 0")
    active = config.num_params(lookup_table=False, active=True)
    return 6 * active + 6 * config.n_layers * config.score_flops * seq_len


#: How far from the given value a divisor is searched.
_NEAR = 10_000


def check_positive(config: object, *names: str) -> None:
    """Raise ``ValueError`` unless every named field of ``config`` is a number above zero, whole where declared so."""
    whole = {field.name for field in dataclasses.fields(config) if field.type in (int, "int")}
    for name in names:
        value = getattr(config, name)
        kind = int if name in whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} is not a {'whole ' if name in whole else ''}number; use one above 0")
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive; use a value above 0")


def check_heads(dim: int, n_heads: int, n_kv_heads: int) -> None:
    """Raise ``ValueError`` unless ``n_heads`` divides ``dim`` and ``n_kv_heads`` divides ``n_heads``."""
    if dim % n_heads:
        raise ValueError(f"n_heads={n_heads} does not divide dim={dim}; try {_near_divisors('n_heads', dim, n_heads)}")
    if n_heads % n_kv_heads:
        fix = _near_divisors("n_kv_heads", n_heads, n_kv_heads)
        raise ValueError(f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}; try {fix}")


def _near_divisors(name: str, total: int, given: int) -> str:
    """The nearest divisors of ``total`` on both sides of ``given``, as ``name=2 or name=4``; 1 where none is near."""
    start = min(given, total)
    below = next((d for d in range(start, max(0, start - _NEAR), -1) if total % d == 0), 1)
    above = [d for d in range(given, min(total, given + _NEAR) + 1) if total % d == 0][:1]
    return " or ".join(f"{name}={d}" for d in [below, *above])

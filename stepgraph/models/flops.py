"""Parameter and FLOP counts of dense transformers."""

from typing import Protocol

from torch import nn


class CountableConfig(Protocol):
    """The part of a model configuration that its FLOP count needs."""

    dim: int
    n_layers: int

    def num_params(self, *, lookup_table: bool = True) -> int: ...


def num_params(model: nn.Module) -> int:
    """Number of parameters of ``model``, each tied one counted once; ``model`` may be on the meta device."""
    return sum(param.numel() for param in model.parameters())


def dense_flops_per_token(config: CountableConfig, seq_len: int) -> int:
    """Training FLOPs (forward and backward) per token at sequences of ``seq_len``: ``6 N + 12 n_layers dim seq_len``.

    ``N`` counts every parameter that multiplies a token: the output head is in, an embedding table that is only looked
    up is out, and a tied table is in once, as the head. The attention term counts the full ``seq_len x seq_len``
    scores, although a causal kernel may skip half of them. Recomputed activations do not count.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} is not positive; give a value above 0")
    return 6 * config.num_params(lookup_table=False) + 12 * config.n_layers * config.dim * seq_len

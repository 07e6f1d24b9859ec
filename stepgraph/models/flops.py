"""Parameter and FLOP counts of transformers, dense and with experts."""

from typing import Protocol

from torch import nn


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
    counts the full ``seq_len x seq_len`` scores, although a causal kernel may skip half of them. Recomputed activations
    do not count.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} is not positive; give a value above 0")
    active = config.num_params(lookup_table=False, active=True)
    return 6 * active + 6 * config.n_layers * config.score_flops * seq_len

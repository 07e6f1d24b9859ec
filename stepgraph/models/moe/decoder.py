"""What the decoders with experts have in common: embedding, blocks, head, RoPE tables, and the balance of load."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.cache import Cache, tokens_in
from stepgraph.models.documents import check_positions, document_mask
from stepgraph.models.init import Part, init_parameters
from stepgraph.models.moe.router import Router
from stepgraph.models.rope import YarnScaling, rope_tables


class MoEDecoder(nn.Module):
    """A decoder: ``forward(tokens)`` takes (B, T) int64 and returns logits (B, T, V); with a ``cache``, of the tokens
    that follow those in it; with ``positions`` (B, T), of packed documents that do not see each other (see
    `stepgraph.models.documents`).

    Built directly, its weights are initialized. Built under ``torch.device("meta")``, call ``to_empty(device=...)`` and
    then :meth:`init_weights`. With tied embeddings there is no ``head`` module, so the tie survives both.

    ``sum_over_ranks``: the sum of an int64 tensor over all ranks that train the model; `parallelize` sets it.
    """

    rope_cos: torch.Tensor  # (max_seq_len, 1, rope_dim) fp32, not in the state dict
    rope_sin: torch.Tensor  # the same, its first half negated: see rope_tables

    def __init__(self, config: Any, blocks: Iterable[nn.Module], rope_dim: int, scaling: YarnScaling | None = None):
        super().__init__()
        self.config, self._rope = config, (rope_dim, config.rope_theta, scaling)
        self.sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = _alone
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(config.max_seq_len, 1, rope_dim, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        self.init_weights()

    @property
    def routers(self) -> list[Router]:
        """The routers of the layers that have experts, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def init_weights(self, seed: int | None = None, parts: Mapping[str, Part] | None = None) -> None:
        """Fill parameters and buffers in place; ``seed`` and ``parts`` as in `init_parameters`."""
        init_parameters(self, self.config.n_layers, seed, parts)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fill only the buffers: the RoPE tables, and routers without bias. For a model built on meta whose weights
        come from a checkpoint."""
        if self.rope_cos.is_meta:
            return
        cos, signed_sin = rope_tables(self.config.max_seq_len, *self._rope)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(signed_sin)
        for router in self.routers:
            router.init_buffers()

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:  # (B, T) int64 -> (B, T, V)
        limit, start = self.config.max_seq_len, tokens_in(cache)
        T = start + tokens.shape[1]
        if limit < T:
            raise ValueError(f"sequence length {T} is above max_seq_len={limit}; shorten it or raise max_seq_len")
        if positions is not None:
            check_positions(positions, tokens, cache)
        x = self.embed(tokens)  # (B, T, D)
        # The dtype, as in Llama3.
        rows = slice(start, T) if positions is None else positions
        cos, signed_sin = self.rope_cos[rows].to(x.dtype), self.rope_sin[rows].to(x.dtype)
        mask = None if positions is None else document_mask(positions, x.dtype)
        for block, kept in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = block(x, cos, signed_sin, kept, mask)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)  # (B, T, V)

    @torch.no_grad()
    def end_of_step(self) -> dict[str, torch.Tensor]:
        """Once a step, after the optimizer's update: move the selection biases towards balance and clear the counts.

        The bias of an expert with less than the mean load rises by ``balance_rate``, that of one with more falls. A
        captured step has this in its graph; a loop of your own calls `stepgraph.end_of_step`.

        Returns ``expert_load``: the load of each layer's most loaded expert over the mean, (layers with experts,) fp32.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1.
        """
        routers = self.routers
        load = self.sum_over_ranks(torch.stack([router.tokens_per_expert for router in routers]))  # (L, E)
        total = load.sum(dim=1, keepdim=True)
        above = load * load.shape[1] - total  # integers: the comparison with the mean is exact
        moved = above.sign() * -self.config.moe.balance_rate  # (L, E) fp32
        for router, step in zip(routers, moved, strict=True):
            if router.expert_bias is not None:
                router.expert_bias.add_(step)
            router.tokens_per_expert.zero_()
        return {"expert_load": load.amax(dim=1) * load.shape[1] / total.squeeze(1)}


def _alone(value: torch.Tensor) -> torch.Tensor:
    return value

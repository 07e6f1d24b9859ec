"""What the decoders with experts have in common: the balance of load."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stepgraph.models.decoder import Decoder
from stepgraph.models.moe.router import Router, alone
from stepgraph.models.rope import YarnScaling

#: The part of a tensor-parallel plan that experts are, module -> style: to experts, tensor-parallel ranks are
#: data-parallel ones, and each brings its part of the sequence.
EXPERTS_PLAN = {"layers.*.mlp.router": "sequence", "layers.*.mlp.experts.*": "sequence"}
#: Fields of the configuration that weights do not depend on.
FREE = ("max_seq_len", "moe.balance_rate", "moe.balance_loss")


class MoEDecoder(Decoder):
    """A `Decoder` with experts.

    ``sum_over_ranks``: the sum of an int64 tensor over all ranks that train the model; `parallelize` sets it.
    """

    def __init__(self, config: Any, blocks: Iterable[nn.Module], rope_dim: int, scaling: YarnScaling | None = None):
        super().__init__(config, blocks, rope_dim, scaling)
        self.sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = alone

    @property
    def routers(self) -> list[Router]:
        """The routers of the layers that have experts, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def init_buffers(self) -> None:
        """Fill only the buffers: the RoPE tables, and routers without bias. For a model built on meta whose weights
        come from a checkpoint."""
        super().init_buffers()
        for router in () if self.rope_cos.is_meta else self.routers:
            router.init_buffers()

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

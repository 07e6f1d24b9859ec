"""Mixture of experts: its shape, router, grouped experts, the exchange of rows between them, balance of load.

Source of the router: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores, the bias that
only chooses); "DeepSeek-V2", 2024, section 2.1.2 (softmax scores, groups).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.errors import unknown_name
from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, sort_by_expert
from stepgraph.models.decoder import Decoder, Norm, SwiGLU
from stepgraph.models.family import check_positive
from stepgraph.models.loss import add_to_loss
from stepgraph.models.rope import YarnScaling
from stepgraph.regions import region

Scoring = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class MoEConfig:
    """Shape of a mixture-of-experts layer."""

    n_experts: int  # routed experts
    top_k: int  # experts that each token goes to
    ffn_dim: int  # width of one expert's SwiGLU
    n_shared: int = 0  # experts that every token goes to: one SwiGLU of n_shared * ffn_dim
    scoring: Scoring = "softmax"  # the router's logits to scores
    normalize: bool = True  # the weights of a token's experts are their scores divided by their sum
    scale: float = 1.0  # weights are multiplied by this
    n_groups: int = 1  # groups that the experts form
    top_groups: int = 1  # groups that a token may choose its experts from
    selection_bias: bool = False  # a bias per expert, added to its score where experts are chosen, and nowhere else
    balance_rate: float = 0.001  # what a step moves each selection bias by, against the expert's load
    balance_loss: float = 0.0  # weight of each layer's sequence-wise balance loss in the training loss; 0: none

    def __post_init__(self) -> None:
        check_positive(self, "n_experts", "top_k", "ffn_dim", "scale", "n_groups", "top_groups")
        for name in ("n_shared", "balance_rate", "balance_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; use 0 for none")
        if self.scoring not in get_args(Scoring):
            raise unknown_name("scoring", self.scoring, get_args(Scoring))
        if self.n_experts % self.n_groups:
            raise ValueError(f"n_groups={self.n_groups} does not divide n_experts={self.n_experts}; try n_groups=1")
        if self.top_groups > self.n_groups:
            raise ValueError(f"top_groups={self.top_groups} is above n_groups={self.n_groups}; try {self.n_groups}")
        reachable = self.top_groups * (self.n_experts // self.n_groups)
        if self.top_k > reachable:
            raise ValueError(
                f"top_k={self.top_k} is above the {reachable} experts of top_groups={self.top_groups} groups; "
                f"try top_k={reachable}"
            )
        if self.scoring == "sigmoid" and self.n_groups == self.n_experts > 1:
            raise ValueError(
                f"n_groups={self.n_groups} leaves one expert a group, and sigmoid scores rank groups by their best "
                f"two; try n_groups={self.n_experts // 2 if self.n_experts % 2 == 0 else 1}"
            )

    def num_params(self, dim: int, *, active: bool = False) -> int:
        """Number of parameters of a layer of width ``dim``; ``active``: only the ones that one token uses."""
        experts = self.top_k if active else self.n_experts
        return self.n_experts * dim + 3 * (experts + self.n_shared) * dim * self.ffn_dim


class Router(nn.Module):
    """``forward(x, sequences)``: (N, D), the tokens of ``sequences`` equally long sequences -> each token's experts,
    (N, K) int64, and their weights, (N, K) fp32.

    Scores are computed in fp32 whatever the dtype of ``x``, also under autocast: choices hang on their last digits.

    ``sum_over_sequence``: sums over the ranks that have parts of the same sequences; set by `parallelize`.
    """

    expert_bias: torch.Tensor | None  # (E,) fp32, saved with the weights
    tokens_per_expert: torch.Tensor  # (E,) int64: tokens of the step so far, zero between steps

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.sum_over_sequence: Callable[[torch.Tensor], torch.Tensor] = alone
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        bias = torch.zeros(config.n_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("tokens_per_expert", torch.zeros(config.n_experts, dtype=torch.int64), persistent=False)

    def init_buffers(self) -> None:
        """No bias, no tokens: for a model that was built on meta."""
        for _, buffer in self.named_buffers():
            buffer.zero_()

    def forward(self, x: torch.Tensor, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())  # (N, E)
            scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(dim=-1)
            with torch.no_grad():
                chosen = self.choose(scores)  # (N, K)
                # A comparison rather than a scatter: no additions in varying order, and it fuses with its neighbours.
                experts = torch.arange(self.config.n_experts, device=x.device)
                counts = (chosen.unsqueeze(-1) == experts).sum(dim=(0, 1))  # (E,)
            if self.config.balance_loss and torch.is_grad_enabled():
                add_to_loss(self._balance_loss(scores.unflatten(0, (sequences, -1))))
            weights = scores.gather(1, chosen)
            if self.config.normalize:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            return chosen, _Counted.apply(weights * self.config.scale, counts, self.tokens_per_expert)

    def _balance_loss(self, scores: torch.Tensor) -> torch.Tensor:
        """(B, T, E) -> this rank's part of ``balance_loss * sum_e f_e P_e``, the mean over the sequences, a scalar.

        ``f_e``: the share of a sequence's choices (by score only) that fall on expert e, times E (1: balance). ``P_e``:
        the mean of its scores, each token's divided by their sum.

        Source: "DeepSeek-V3 Technical Report", 2024, section 2.1.2, equations 17 to 20.
        """
        config = self.config
        with torch.no_grad():
            best = scores.topk(config.top_k, dim=-1)[1].flatten(1)  # (B, T K)
            experts = torch.arange(config.n_experts, device=scores.device)
            counts = self.sum_over_sequence((best.unsqueeze(-1) == experts).sum(dim=1))  # (B, E)
            choices = counts.sum(dim=1, keepdim=True)  # (B, 1)
            share = counts * config.n_experts / choices
        score = (scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)).sum(dim=1) * config.top_k / choices  # (B, E)
        return config.balance_loss * (share * score).sum(dim=1).mean()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """(N, E) -> (N, K): the best experts by score and bias, out of the best groups."""
        config = self.config
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        if config.n_groups > 1:
            grouped = ranked.unflatten(1, (config.n_groups, -1))  # (N, G, E / G)
            best = grouped.topk(2, dim=-1)[0].sum(dim=-1) if config.scoring == "sigmoid" else grouped.amax(dim=-1)
            groups = best.topk(config.top_groups, dim=-1)[1]
            outside = torch.ones_like(best, dtype=torch.bool).scatter(1, groups, False)
            ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
        return ranked.topk(config.top_k, dim=-1)[1]


def alone(value: torch.Tensor) -> torch.Tensor:
    """The sum of ``value`` over one rank."""
    return value


class _Counted(torch.autograd.Function):
    """Return the weights unchanged; backward adds ``counts`` to ``tally``. Forward would count tokens again in
    recomputation, and count those of evaluations."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, counts: torch.Tensor, tally: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        ctx.tally = tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        ctx.tally.add_(counts)
        return grad, None, None


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm`, under autocast in its dtype, as in ``nn.Linear``."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    return grouped_mm(rows, weight, offsets)


class GroupedLinear(nn.Module):
    """One linear map for each expert, without bias: ``weight`` is (E, out, in).

    ``forward(rows, offsets)``: rows (R, in) sorted by expert, ``offsets`` (E,) int32 the ends of the expert rows.
    """

    def __init__(self, n_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, in) -> (R, out)
        return grouped_product(rows, self.weight.mT, offsets)


class Experts(nn.Module):
    """A SwiGLU for each expert, ``down(silu(gate(x)) * up(x))``; the products by gate and up are one."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_up_proj = GroupedLinear(n_experts, dim, 2 * ffn_dim)
        self.down_proj = GroupedLinear(n_experts, ffn_dim, dim)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # (R, D) -> (R, D)
        gate, up = self.gate_up_proj(rows, offsets).chunk(2, dim=-1)  # (R, F) each
        return self.down_proj(F.silu(gate) * up, offsets)


class Exchange:
    """Brings tokens to experts, sorted, and their results back. Where all experts are on this rank: a permutation."""

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``x`` (N, D), ``chosen`` (N, K) int64 -> rows (R, D) sorted by the experts that are here, the ends of each
        one's rows (E_local,) int32, and what `combine` needs."""
        order, places, counts = sort_by_expert(chosen, n_experts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return gather_rows(x, order, places), offsets, (order, places)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, state: Any) -> torch.Tensor:
        """The expert rows (R, D), ``weights`` (N, K) fp32 -> (N, D), the weighted sum over each token's experts."""
        order, places = state
        return combine_rows(rows, places, weights, order)


class MoE(nn.Module):
    """Each token through its ``top_k`` experts, weighted, and through the shared ones. No token is dropped."""

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.n_experts = config.n_experts
        self.router = Router(dim, config)
        self.experts = Experts(config.n_experts, dim, config.ffn_dim)
        self.shared = SwiGLU(dim, config.n_shared * config.ffn_dim) if config.n_shared else None
        self.exchange = Exchange()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        tokens = x.flatten(0, 1)  # (N, D)
        chosen, weights = self.router(tokens, x.shape[0])  # (N, K)
        with region("dispatch"):
            rows, offsets, state = self.exchange.dispatch(tokens, chosen, self.n_experts)  # (R, D)
        with region("compute"):
            rows = self.experts(rows, offsets)
        with region("combine"):
            y = self.exchange.combine(rows, weights, state).view_as(x)
        return y if self.shared is None else y + self.shared(x)


#: The part of a tensor-parallel plan that experts are, module -> style: to experts, tensor-parallel ranks are
#: data-parallel ones, and each brings its part of the sequence.
EXPERTS_PLAN = {"layers.*.mlp.router": "sequence", "layers.*.mlp.experts.*": "sequence"}
#: Fields of the configuration that weights do not depend on.
FREE = ("max_seq_len", "moe.balance_rate", "moe.balance_loss")


class MoEDecoder(Decoder):
    """A `Decoder` with experts.

    ``sum_over_ranks``: the sum of an int64 tensor over all ranks that train the model; `parallelize` sets it.
    """

    def __init__(
        self, config: Any, blocks: Iterable[nn.Module], norm: Norm, rope_dim: int, scaling: YarnScaling | None
    ):
        super().__init__(config, blocks, norm, rope_dim, scaling)
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

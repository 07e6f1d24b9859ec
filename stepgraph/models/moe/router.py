"""The router of a layer with experts: which experts each token goes to, and with which weights.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores, the bias that only chooses);
"DeepSeek-V2", 2024, section 2.1.2 (softmax scores, groups).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stepgraph.models.loss import add_to_loss
from stepgraph.models.moe.config import MoEConfig


class Router(nn.Module):
    """``forward(x, sequences)``: (N, D), the tokens of ``sequences`` equally long sequences -> each token's experts,
    (N, K) int64, and their weights, (N, K) fp32.

    Scores are computed in fp32 whatever the dtype of ``x``, also under autocast: choices hang on their last digits.

    ``sum_over_sequence``: the sum of a tensor over the ranks that have parts of the same sequences; `parallelize` sets
    it.
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
                # A comparison rather than a scatter: no additions whose order is open, and it fuses with what is near.
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

        ``f_e``: the share of a sequence's choices by score alone that fall on expert e, times E: 1 in balance. ``P_e``:
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
    """The weights as they are; backward adds ``counts`` to ``tally``.

    Backward and not forward: it runs once for each microbatch, where recomputation runs forward twice, and never in an
    evaluation.
    """

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

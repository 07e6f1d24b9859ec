"""The shape of a layer with experts."""

from dataclasses import dataclass
from typing import Literal, get_args

from stepgraph.errors import unknown_name
from stepgraph.models.checks import check_positive

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
        """Raises ``ValueError`` for one that cannot be built."""
        check_positive(self, "n_experts", "top_k", "ffn_dim", "scale", "n_groups", "top_groups")
        for name in ("n_shared", "balance_rate", "balance_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; give 0 for none")
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

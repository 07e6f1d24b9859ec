"""Muon as graph nodes: momentum, whose matrices are orthogonalized by products in bf16, node by node as torch does.

Bitwise equal to eager on a CPU.
Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024), as torch.optim.Muon computes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph import compat
from stepgraph.capture.optimizer.arithmetic import add_scaled, scaled
from stepgraph.capture.optimizer.rule import Member, Rule
from stepgraph.capture.optimizer.skip import Skip


class MuonRule(Rule):
    constants = ("momentum", "nesterov", "weight_decay", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
    complex = False
    shards = False

    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        state = optimizer.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return {"momentum_buffer": state["momentum_buffer"]}

    def trace(
        self,
        group: dict[str, Any],
        members: Sequence[Member],
        lr: torch.Tensor,
        attribute: Callable[[str], None],
        skip: Skip,
    ) -> None:
        for member in members:
            attribute(member.path)
            param, grad = member.param, member.grad
            buffer = torch.lerp(member.state["momentum_buffer"], grad, 1 - group["momentum"])
            update = torch.lerp(grad, buffer, group["momentum"]) if group["nesterov"] else buffer
            update = compat.muon_orthogonalized(update, group)
            rate = compat.muon_rate(lr, group, param.shape)
            # Only now: until torch 2.14, orthogonalizing a bf16 buffer scales the buffer itself.
            skip.write(member.state["momentum_buffer"], buffer)
            skip.write(param, add_scaled(scaled(param, 1 - lr * group["weight_decay"]), update, -rate))

"""SGD with momentum as graph nodes.

With ``fused=True`` one fused node per parameter group; otherwise torch's single-tensor formula, bitwise equal to eager
on a CPU.

Eager sets the momentum buffer to the first gradient, and a graph has no first step. A buffer of -0.0 gives the same
bits: ``momentum * -0.0 + g`` is ``g``, its sign included. With dampening the graph reads from a tensor whether the step
is the first.
Source: Sutskever et al., On the importance of initialization and momentum (2013), as torch.optim.SGD computes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stepgraph.capture.optimizer.arithmetic import add_scaled, scaled
from stepgraph.capture.optimizer.rule import Member, Rule

aten = torch.ops.aten

#: Momentum buffers made here, for dampened momentum: whether no step has filled them yet, a tensor.
_UNFILLED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class SGDRule(Rule):
    constants = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "fused", "foreach")
    flags = ("differentiable",)

    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        if group["momentum"] == 0:
            return {}
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            buffer = torch.zeros_like(param, memory_format=torch.preserve_format).neg_()
            if group["dampening"] != 0:
                if group["fused"]:
                    raise ValueError("SGD(fused=True, dampening=...) cannot be captured; use fused=False")
                _UNFILLED[buffer] = torch.ones((), dtype=torch.bool, device=param.device)
            state["momentum_buffer"] = buffer
        tensors = {"momentum_buffer": state["momentum_buffer"]}
        if tensors["momentum_buffer"] in _UNFILLED:
            tensors["unfilled"] = _UNFILLED[tensors["momentum_buffer"]]
        return tensors

    def trace(
        self, group: dict[str, Any], members: Sequence[Member], lr: torch.Tensor, attribute: Callable[[str], None]
    ) -> None:
        if group["fused"]:
            attribute("")
            _trace_fused(group, members, lr)
            return
        for member in members:
            attribute(member.path)
            _trace_one(group, member, lr)


def _trace_fused(group: dict[str, Any], members: Sequence[Member], lr: torch.Tensor) -> None:
    options = {key: group[key] for key in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    aten._fused_sgd_.tensor_lr(
        [m.param for m in members],
        [m.grad for m in members],
        [m.state["momentum_buffer"] for m in members] if group["momentum"] != 0 else [],
        lr=lr,
        **options,
        is_first_step=False,
    )


def _trace_one(group: dict[str, Any], member: Member, lr: torch.Tensor) -> None:
    """One parameter's update in the operators, and the order, of torch's single-tensor SGD."""
    param, grad, state = member.param, member.grad, member.state
    momentum = group["momentum"]
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"] != 0:
        grad = torch.add(grad, param, alpha=group["weight_decay"])
    if momentum != 0:
        buffer = scaled(state["momentum_buffer"], momentum, group["foreach"])
        buffer = torch.add(buffer, grad, alpha=1 - group["dampening"])
        if "unfilled" in state:
            buffer = torch.where(state["unfilled"], grad, buffer)
            state["unfilled"].fill_(False)
        state["momentum_buffer"].copy_(buffer)
        grad = torch.add(grad, buffer, alpha=momentum) if group["nesterov"] else buffer
    param.copy_(add_scaled(param, grad, -lr))

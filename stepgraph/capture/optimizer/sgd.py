"""SGD with momentum as graph nodes.

With ``fused=True`` one fused node per parameter group; otherwise torch's single-tensor formula, bitwise equal to eager
on a CPU.

Eager sets the momentum buffer to the first gradient, and a graph has no first step. A buffer of -0.0 gives the same
bits: ``momentum * -0.0 + g`` is ``g``, its sign included. With dampening the graph asks whether the buffer is
-0.0 throughout, which only an unfilled one is (or one that has seen nothing but gradients of -0.0).
Source: Sutskever et al., On the importance of initialization and momentum (2013), as torch.optim.SGD computes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.capture.optimizer.arithmetic import add_scaled, scaled
from stepgraph.capture.optimizer.rule import Member, Rule
from stepgraph.capture.optimizer.skip import Skip

aten = torch.ops.aten


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
            if group["dampening"] != 0 and group["fused"]:
                raise ValueError("SGD(fused=True, dampening=...) cannot be captured; use fused=False")
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            _parts(state["momentum_buffer"]).neg_()
        return {"momentum_buffer": state["momentum_buffer"]}

    def trace(
        self,
        group: dict[str, Any],
        members: Sequence[Member],
        lr: torch.Tensor,
        attribute: Callable[[str], None],
        skip: Skip,
    ) -> None:
        if group["fused"]:
            attribute("")
            _trace_fused(group, members, lr, skip)
            return
        for member in members:
            attribute(member.path)
            _trace_one(group, member, lr, skip)


def _trace_fused(group: dict[str, Any], members: Sequence[Member], lr: torch.Tensor, skip: Skip) -> None:
    options = {key: group[key] for key in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    aten._fused_sgd_.tensor_lr(
        [m.param for m in members],
        [m.grad for m in members],
        [m.state["momentum_buffer"] for m in members] if group["momentum"] != 0 else [],
        lr=lr,
        **options,
        **skip.found_inf(members[0].param.device),
        is_first_step=False,
    )


def _trace_one(group: dict[str, Any], member: Member, lr: torch.Tensor, skip: Skip) -> None:
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
        if group["dampening"] != 0:
            buffer = torch.where(_unfilled(state["momentum_buffer"]), grad, buffer)
        buffer = buffer.to(state["momentum_buffer"].dtype)  # which a cast of the model leaves
        skip.write(state["momentum_buffer"], buffer)
        grad = torch.add(grad, buffer, alpha=momentum) if group["nesterov"] else buffer
    skip.write(param, add_scaled(param, grad, -lr))


def _unfilled(buffer: torch.Tensor) -> torch.Tensor:
    """Whether no step has filled the buffer yet, a bool scalar."""
    return ((_parts(buffer) == 0) & torch.signbit(_parts(buffer))).all()


def _parts(buffer: torch.Tensor) -> torch.Tensor:
    """The real numbers of ``buffer``."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer

"""Adafactor as graph nodes: the second moment of a matrix as one row and one column.

Bitwise equal to eager on a CPU, in its single-tensor form (torch's default, on CUDA too) and in its foreach form.
Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018), as
torch.optim.Adafactor computes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.capture.optimizer.arithmetic import add_scaled, larger, lerp, power, scaled, smaller
from stepgraph.capture.optimizer.rule import Member, Rule, count_dtype
from stepgraph.capture.optimizer.skip import Skip


class AdafactorRule(Rule):
    constants = ("beta2_decay", "eps", "d", "weight_decay", "maximize", "foreach")
    complex = False
    shards = False

    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        state = optimizer.state[param]
        if not state:
            made = {"step": torch.zeros((), dtype=count_dtype())}
            if param.ndim > 1:
                *batch, rows, columns = param.shape
                made |= {"row_var": param.new_zeros(*batch, rows, 1), "col_var": param.new_zeros(*batch, 1, columns)}
            else:
                made["variance"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state.update(made)  # all or nothing, if memory runs out
        keys = ("step", "row_var", "col_var") if param.ndim > 1 else ("step", "variance")
        return {key: state[key] for key in keys}

    def trace(
        self,
        group: dict[str, Any],
        members: Sequence[Member],
        lr: torch.Tensor,
        attribute: Callable[[str], None],
        skip: Skip,
    ) -> None:
        # eps[0] None means that of the dtype; torch looks at the first parameter's.
        eps = torch.finfo(members[0].param.dtype).eps if group["eps"][0] is None else group["eps"][0]
        factors: dict[float, tuple] = {}  # parameters at the same step share what depends on it
        for member in members:
            attribute(member.path)
            new_step = member.state["step"] + 1
            if member.seen not in factors:
                step = new_step.double().to(lr.device)
                factors[member.seen] = power(step, group["beta2_decay"]), smaller(lr, 1 / power(step, 0.5))
            _trace_one(group, member, lr, eps, *factors[member.seen], skip)
            skip.write(member.state["step"], new_step)


def _trace_one(
    group: dict[str, Any],
    member: Member,
    lr: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    rho: torch.Tensor,
    skip: Skip,
) -> None:
    """One parameter's update. ``weight``: of the new second moment. ``rho``: the step size relative to the parameter.
    Both fp64 scalars."""
    param, state = member.param, member.state
    grad = -member.grad if group["maximize"] else member.grad
    alpha = larger(group["eps"][1], _norm(param) / param.numel() ** 0.5) * rho
    if group["weight_decay"] != 0:
        param = scaled(param, 1 - lr * group["weight_decay"], group["foreach"])
    if grad.ndim > 1:
        row = lerp(state["row_var"], _mean_square(grad, -1), weight)
        column = lerp(state["col_var"], _mean_square(grad, -2), weight)
        skip.write(state["row_var"], row)
        skip.write(state["col_var"], column)
        variance = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp(min=eps))
    else:
        variance = lerp(state["variance"], grad * grad, weight)
        skip.write(state["variance"], variance)
    update = variance.clamp(min=eps * eps).rsqrt() * grad
    excess = larger(1.0, _norm(update) / (update.numel() ** 0.5 * group["d"]))
    factor = -alpha / excess
    if group["foreach"]:
        skip.write(member.param, param + scaled(update, factor, foreach=True))
    else:
        skip.write(member.param, add_scaled(param, update, factor))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """The 2-norm, rounded to the dtype of ``x``, as an fp64 scalar."""
    return torch.linalg.vector_norm(x).double()


def _mean_square(grad: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.linalg.vector_norm(grad, dim=dim, keepdim=True).square() / grad.size(dim)

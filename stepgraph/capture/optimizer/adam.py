"""Adam, AdamW and `MasterAdamW` as graph nodes.

With ``fused=True`` the update is one fused node per parameter group, in place on the graph's inputs. Otherwise it is
the formula of torch's single-tensor Adam, with the factors that depend on the step in fp64: functional operators with
one ``copy_`` per state tensor, which the in-place pass turns into writes. Bitwise equal to eager on a CPU; on CUDA
equal up to the last bits.
Source: Kingma and Ba, Adam (2015); Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), as torch.optim
computes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.capture.optimizer.arithmetic import add_quotient, divided, power, scaled
from stepgraph.capture.optimizer.master import MasterAdamW, fused_options
from stepgraph.capture.optimizer.rule import Member, Rule, count_dtype
from stepgraph.capture.optimizer.skip import Skip

aten = torch.ops.aten


class AdamRule(Rule):
    constants = ("betas", "weight_decay", "eps", "maximize", "fused", "foreach", "decoupled_weight_decay")
    flags = ("amsgrad", "differentiable", "capturable")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        super().check(optimizer)
        if any(isinstance(beta, torch.Tensor) for group in optimizer.param_groups for beta in group["betas"]):
            raise ValueError(f"{type(optimizer).__name__} with tensor betas cannot be captured; pass them as numbers")

    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        keys = ("step", "exp_avg", "exp_avg_sq")
        if isinstance(optimizer, MasterAdamW):
            optimizer.init_state(param)
            keys += ("master",)
        state = optimizer.state[param]
        if not state:
            on_device = {"dtype": torch.float32, "device": param.device}
            on_host = {"dtype": count_dtype(), "device": "cpu"}
            state["step"] = torch.zeros((), **(on_device if group["fused"] else on_host))
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif "master" not in keys and state["exp_avg"].dtype != param.dtype:
            raise ValueError(
                f"a parameter of shape {list(param.shape)} is {param.dtype} and its state in "
                f"{type(optimizer).__name__} {state['exp_avg'].dtype}, which eager refuses too: convert the model "
                "before its first step, or build the optimizer again"
            )
        return {key: state[key] for key in keys}

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
        factors: dict[float, tuple] = {}  # parameters at the same step share what depends on it
        for member in members:
            attribute(member.path)
            new_step = member.state["step"] + 1
            if member.seen not in factors:
                factors[member.seen] = _factors(group, new_step, lr)
            _trace_one(group, member, new_step, *factors[member.seen], skip)


def _trace_fused(group: dict[str, Any], members: Sequence[Member], lr: torch.Tensor, skip: Skip) -> None:
    params, grads = [m.param for m in members], [m.grad for m in members]
    steps, exp_avgs, exp_avg_sqs = ([m.state[key] for m in members] for key in ("step", "exp_avg", "exp_avg_sq"))
    masters = [m.state["master"] for m in members if "master" in m.state]
    if masters:
        grads = [g.float() for g in grads]
    advance, found_inf = skip.advance(steps[0].device), skip.found_inf(steps[0].device)
    if advance is None:
        aten._foreach_add_.Scalar(steps, 1)
    else:
        aten._foreach_add_.Tensor(steps, advance)
    kernel = aten._fused_adamw_.tensor_lr if group["decoupled_weight_decay"] else aten._fused_adam_.tensor_lr
    targets = masters or params
    options = fused_options(group) | {"amsgrad": False} | found_inf
    kernel(targets, grads, exp_avgs, exp_avg_sqs, [], steps, lr=lr, **options)
    if masters:
        aten._foreach_copy_.default(params, [skip.kept(p, m) for p, m in zip(params, masters, strict=True)])


def _factors(
    group: dict[str, Any], step: torch.Tensor, lr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 scalars of one step: decay factor, negated step size, square root of the second bias correction."""
    beta1, beta2 = group["betas"]
    step = step.double().to(lr.device)
    return 1 - lr * group["weight_decay"], -(lr / (1 - beta1**step)), power(1 - beta2**step, 0.5)


def _trace_one(
    group: dict[str, Any],
    member: Member,
    new_step: torch.Tensor,
    decay: torch.Tensor,
    neg_step_size: torch.Tensor,
    correction2_sqrt: torch.Tensor,
    skip: Skip,
) -> None:
    """One parameter's update in the operators, and the order, of torch's single-tensor Adam."""
    beta1, beta2 = group["betas"]
    param, grad, state = member.param, member.grad, member.state
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"] != 0:
        if group["decoupled_weight_decay"]:
            param = scaled(param, decay, group["foreach"])
        else:
            grad = torch.add(grad, param, alpha=group["weight_decay"])
    param, grad, exp_avg, exp_avg_sq = map(_as_real, (param, grad, state["exp_avg"], state["exp_avg_sq"]))
    exp_avg = torch.lerp(exp_avg, grad, 1 - beta1)
    exp_avg_sq = torch.addcmul(scaled(exp_avg_sq, beta2, group["foreach"]), grad, grad, value=1 - beta2)
    denominator = divided(exp_avg_sq.sqrt(), correction2_sqrt) + group["eps"]
    param = add_quotient(param, exp_avg, denominator, neg_step_size)
    skip.write(state["step"], new_step)
    for old, new in ((state["exp_avg"], exp_avg), (state["exp_avg_sq"], exp_avg_sq), (member.param, param)):
        skip.write(old, torch.view_as_complex(new) if old.is_complex() else new)


def _as_real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers: Adam has moments of each part."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x

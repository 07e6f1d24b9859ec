"""Fused Adam and AdamW, and `MasterAdamW`, as graph nodes: one per parameter group, in place on the graph's inputs.

Without ``fused=True`` the optimizer's own ``step`` is traced.
Source: Kingma and Ba, Adam (2015); Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), as torch.optim
computes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.capture.optimizer.master import MasterAdamW, fused_options
from stepgraph.capture.optimizer.rule import Member, Rule
from stepgraph.capture.optimizer.skip import Skip

aten = torch.ops.aten


class AdamRule(Rule):
    constants = ("betas", "weight_decay", "eps", "maximize", "fused", "foreach", "decoupled_weight_decay")
    flags = ("amsgrad", "differentiable", "capturable")

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return all(group["fused"] for group in optimizer.param_groups) and super().knows(optimizer)

    def init_state(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        keys = ("step", "exp_avg", "exp_avg_sq")
        if isinstance(optimizer, MasterAdamW):
            optimizer.init_state(param)
            keys += ("master",)
        state = optimizer.state[param]
        if not state:
            state.update(  # all or nothing, if memory runs out
                step=torch.zeros((), dtype=torch.float32, device=param.device),
                exp_avg=torch.zeros_like(param, memory_format=torch.preserve_format),
                exp_avg_sq=torch.zeros_like(param, memory_format=torch.preserve_format),
            )
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
        attribute("")
        _trace_fused(group, members, lr, skip)


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

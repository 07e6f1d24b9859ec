"""AdamW for bf16 parameters, with fp32 master weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps an fp32 master copy of every parameter and fp32 moments.

    For models held in bf16 or fp16: ``step`` converts each gradient to fp32, updates the master weights with torch's
    fused kernel and rounds them back into the parameters. State per parameter: ``step``, ``exp_avg``,
    ``exp_avg_sq``, ``master``, all fp32. Arguments: the ones of ``torch.optim.AdamW`` that the fused kernel takes.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)

    def init_state(self, param: torch.Tensor) -> None:
        """Create the state of ``param`` if it has none."""
        state = self.state[param]
        if not state:
            fp32 = {"dtype": torch.float32, "memory_format": torch.preserve_format}
            state.update(  # all or nothing, if memory runs out
                step=torch.zeros((), dtype=torch.float32, device=param.device),
                exp_avg=torch.zeros_like(param, **fp32),
                exp_avg_sq=torch.zeros_like(param, **fp32),
                master=param.detach().to(torch.float32, copy=True),
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``, which would round fp32 state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, saved in state_dict["state"].get(i, {}).items():
                self.state[param][key] = saved.detach().to(param.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update from ``param.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                self.init_state(p)
            states = [self.state[p] for p in params]
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, 1)
            masters = [s["master"] for s in states]
            aten._fused_adamw_(
                masters,
                [p.grad.float() for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                steps,
                lr=group["lr"],
                **fused_options(group),
                amsgrad=False,
            )
            torch._foreach_copy_([_local(p) for p in params], [_local(m) for m in masters])
        return loss


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor, for an operator that DTensor does not have."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fused_options(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers that torch's fused Adam kernels take, but for the learning rate."""
    beta1, beta2 = group["betas"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }

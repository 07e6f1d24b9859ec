"""The optimizer in the graph: AdamW, with its state and learning rate as inputs.

`MasterAdamW` is the optimizer for bf16 parameters: fp32 master weights and moments. `AdamWUpdate` writes one update
as graph nodes. The fused kernel works in place on the graph's inputs; the unfused formula is recorded as functional
operators with one ``copy_`` per state tensor, and the in-place pass turns them into writes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stepgraph import compat

aten = torch.ops.aten


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps an fp32 master copy of every parameter and fp32 moments.

    For models held in bf16 or fp16: ``step`` converts each gradient to fp32, updates the master weights with torch's
    fused kernel and rounds them back into the parameters. State per parameter: ``step``, ``exp_avg``,
    ``exp_avg_sq``, ``master``, all fp32. Arguments: those of ``torch.optim.AdamW`` that the fused kernel takes.
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
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, **fp32)
            state["exp_avg_sq"] = torch.zeros_like(param, **fp32)
            state["master"] = param.detach().to(torch.float32, copy=True)

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
                **_options(group),
                amsgrad=False,
            )
            torch._foreach_copy_(params, masters)
        return loss


def _options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }


class AdamWUpdate:
    """One AdamW update of a list of parameters, as graph nodes.

    ``optimizer``: ``MasterAdamW`` or ``torch.optim.AdamW``. With ``fused=True`` the update is one fused node per
    parameter group. Otherwise it is the formula of torch's unfused AdamW, with the factors that depend on the step in
    fp64: bitwise equal to it on CPU; on CUDA, whose addcdiv fuses a multiply-add, up to the last bit.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), as torch.optim.AdamW computes it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        if type(optimizer) not in (torch.optim.AdamW, MasterAdamW):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} cannot be captured; allowed: torch.optim.AdamW, "
                "stepgraph.MasterAdamW; or capture without an optimizer and step it yourself"
            )
        if compat.has_step_hooks(optimizer):
            raise ValueError("the optimizer has step hooks, which a captured step would not run; remove them")
        self.optimizer = optimizer
        self.master = isinstance(optimizer, MasterAdamW)
        for group in optimizer.param_groups:
            for flag in ("amsgrad", "differentiable", "capturable"):
                if group[flag]:
                    raise ValueError(f"AdamW({flag}=True) cannot be captured; use {flag}=False")
            if isinstance(group["lr"], torch.Tensor) and not group["fused"]:
                raise ValueError("AdamW with a tensor lr is captured with fused=True only; pass fused=True")
            if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
                raise ValueError("AdamW with tensor betas cannot be captured; pass them as numbers")

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the state tensors of one parameter, in the order of the graph's inputs."""
        return ("step", "exp_avg", "exp_avg_sq") + (("master",) if self.master else ())

    def owned(self) -> list[tuple[int, torch.Tensor]]:
        """(group index, parameter) of every parameter the optimizer updates."""
        return [(i, p) for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]]

    def init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state of ``param``; if there is none, created as in eager's first step."""
        state = self.optimizer.state[param]
        if self.master:
            self.optimizer.init_state(param)
        elif not state:
            device = param.device if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def without_state(self) -> list[torch.Tensor]:
        """The parameters that have no state yet."""
        return [p for _, p in self.owned() if not self.optimizer.state.get(p)]

    def drop_state(self, params: Iterable[torch.Tensor]) -> None:
        """Forget the state of ``params``."""
        for param in params:
            self.optimizer.state.pop(param, None)

    def lr_input(self, group: dict[str, Any], device: torch.device) -> torch.Tensor:
        """The tensor through which the graph reads a group's learning rate.

        The CUDA fused kernel reads an fp32 tensor; everything else takes fp64, so that a Python float keeps its
        value.
        """
        dtype = torch.float32 if group["fused"] and device.type == "cuda" else torch.float64
        return torch.zeros((), dtype=dtype, device=device)

    def constants(self) -> tuple:
        """The options that are constants of the graph: when one changes, the step is captured again."""
        return tuple(
            (*_options(group).values(), group["fused"], len(group["params"])) for group in self.optimizer.param_groups
        )

    def trace(
        self,
        group: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, torch.Tensor]],
        live_steps: Sequence[float],
        lr: torch.Tensor,
        paths: Sequence[str],
        attribute: Callable[[str], None],
    ) -> None:
        """Record the update of one group's local tensors; each result is written into its input.

        ``live_steps``: how many steps each parameter has seen. ``attribute`` is called with the module path of what is
        recorded next.
        """
        if group["fused"]:
            attribute("")
            self._trace_fused(group, params, grads, states, lr)
            return
        factors: dict[float, tuple] = {}  # parameters at the same step share what depends on it
        for param, grad, state, live_step, path in zip(params, grads, states, live_steps, paths, strict=True):
            attribute(path)
            new_step = state["step"] + 1
            if live_step not in factors:
                factors[live_step] = _factors(group, new_step, lr)
            _trace_unfused(group, param, grad, state, new_step, *factors[live_step])

    def _trace_fused(self, group: dict, params: Sequence, grads: Sequence, states: Sequence[dict], lr: Any) -> None:
        targets = [s["master"] for s in states] if self.master else list(params)
        if self.master:
            grads = [g.float() for g in grads]
        steps = [s["step"] for s in states]
        aten._foreach_add_.Scalar(steps, 1)
        exp_avgs, exp_avg_sqs = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        aten._fused_adamw_.tensor_lr(
            targets, list(grads), exp_avgs, exp_avg_sqs, [], steps, lr=lr, **_options(group), amsgrad=False
        )
        if self.master:
            aten._foreach_copy_.default(list(params), targets)


def _factors(group: dict, step: torch.Tensor, lr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 scalars of one step: decay factor, negated step size, square root of the second bias correction."""
    beta1, beta2 = group["betas"]
    step = step.double().to(lr.device)
    return 1 - lr * group["weight_decay"], -(lr / (1 - beta1**step)), (1 - beta2**step).sqrt()


def _trace_unfused(
    group: dict,
    param: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    new_step: torch.Tensor,
    decay: torch.Tensor,
    neg_step_size: torch.Tensor,
    correction2_sqrt: torch.Tensor,
) -> None:
    """One parameter's update in the operators, and the order, of torch's single-tensor AdamW."""
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        grad = -grad
    new_param = param * decay if group["weight_decay"] != 0 else param
    exp_avg = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = torch.addcmul(state["exp_avg_sq"] * beta2, grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / correction2_sqrt + group["eps"]
    # addcdiv takes its factor only as a number: here are its terms, in its order, with the factor as a tensor.
    if param.dtype in (torch.bfloat16, torch.float16):  # addcdiv rounds once, at its end
        step = new_param.float() + exp_avg.float() * neg_step_size / denominator.float()
        new_param = step.to(param.dtype)
    else:
        new_param = new_param + exp_avg * neg_step_size / denominator
    state["step"].copy_(new_step)
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    param.copy_(new_param)

"""The interface of each kind of optimizer for `Update`: its constants, its state, and one update as graph nodes; and
the kinds whose formulas are known, which compute what torch.optim does; others are traced by their own ``step``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stepgraph.capture.optimizer.factors import add_scaled, larger, lerp, power, scaled, smaller

aten = torch.ops.aten


class Skip:
    """Whether a step's update is left out. ``flag``: a bool scalar that the graph computes; None: it never is.

    A flag that a count on the host needs (``step`` of optimizers that are not fused) is copied there; the host waits.
    """

    def __init__(self, flag: torch.Tensor | None = None):
        self.flag = flag
        self._made: dict[Any, torch.Tensor] = {}

    def write(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new`` into ``old``, unless the update is left out."""
        old.copy_(self.kept(old, new))

    def kept(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What is to be written into ``old``: ``new``, or itself; in the dtype that both promote to."""
        return new if self.flag is None else torch.where(self._on(old.device), old, new)

    def found_inf(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The argument that makes torch's fused kernels write nothing where it is 1; none where they always write."""
        return {} if self.flag is None else {"found_inf": self._on(device, torch.float32)}

    def advance(self, device: torch.device) -> torch.Tensor | None:
        """What a count of steps grows by, fp32: 0 or 1. None: always 1."""
        if self.flag is None:
            return None
        key = device, "advance"
        if key not in self._made:
            self._made[key] = 1 - self._on(device, torch.float32)
        return self._made[key]

    def _on(self, device: torch.device, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        key = device, dtype
        if key not in self._made:
            self._made[key] = self.flag.to(device, dtype)
        return self._made[key]


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
    """The numbers that torch's fused Adam kernels take, except for the learning rate."""
    beta1, beta2 = group["betas"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }


@dataclass(frozen=True)
class Member:
    """One parameter of an update, as the trace sees it.

    ``param``, ``grad``, ``state``: local tensors; state by key. ``seen``: steps that the parameter has seen, where the
    host counts them. ``path``: its module.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    seen: float
    path: str


def count_dtype() -> torch.dtype:
    """The dtype in which torch's optimizers count steps on the host."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class Rule(ABC):
    """One kind of optimizer. ``constants``: options of a group that the graph has as constants. ``flags``: options that
    must be off. ``complex``: whether parameters may be complex. ``shards``: whether a shard's update needs no other."""

    constants: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[tuple[str, ...]] = ()
    complex: ClassVar[bool] = True
    shards: ClassVar[bool] = True

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the formula holds for these options; the optimizer's own ``step`` is traced for others."""
        return not any(
            any(group[flag] for flag in self.flags) or (isinstance(group["lr"], Tensor) and not group.get("fused"))
            for group in optimizer.param_groups
        )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for options and parameters that cannot be captured."""
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._check_param(name, group, param)

    def _check_param(self, name: str, group: dict[str, Any], param: Tensor) -> None:
        shape = list(param.shape)
        if param.is_complex() and (not self.complex or group.get("fused")):
            option = "(fused=True)" if group.get("fused") else ""
            fix = "use fused=False" if option and self.complex else "give it to AdamW, Adam or SGD without fused=True"
            raise ValueError(f"{name}{option} takes no complex parameters, and one of shape {shape} is complex; {fix}")
        placements = enumerate(getattr(param, "placements", ()))
        if not self.shards and any(p.is_shard() and param.device_mesh.size(axis) > 1 for axis, p in placements):
            raise ValueError(
                f"{name} needs whole matrices, and a parameter of shape {shape} is sharded; use AdamW, Adam or SGD"
            )

    def constants_of(self, group: dict[str, Any]) -> tuple:
        """The options that are constants of the graph: when one changes, the step is captured again."""
        return tuple(group.get(key) for key in self.constants)

    @abstractmethod
    def init_state(self, optimizer: torch.optim.Optimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of the state that the graph reads and writes, by key; created as in eager's first step."""

    @abstractmethod
    def trace(
        self, group: dict[str, Any], members: Sequence[Member], lr: Tensor, attribute: Callable[[str], None], skip: Skip
    ) -> None:
        """Record the update of one group; each result is written into its input, unless ``skip`` leaves it out.

        ``attribute`` is called with the module path of the operators recorded next.
        """


def _check_shape(optimizer: torch.optim.Optimizer, param: Tensor, held: Tensor) -> None:
    """Raise if the state of ``param`` has another shape: eager's fused kernels would access memory out of bounds."""
    if held.shape != param.shape:
        raise ValueError(
            f"a parameter has shape {list(param.shape)} and its state in {type(optimizer).__name__} "
            f"{list(held.shape)}: resize the model before its first step, or build the optimizer again"
        )


class AdamRule(Rule):
    """Fused Adam and AdamW, and `MasterAdamW`: one node per parameter group, in place on the graph's inputs.

    Without ``fused=True`` the optimizer's own ``step`` is traced.
    Source: Kingma and Ba, Adam (2015); Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).
    """

    constants = ("betas", "weight_decay", "eps", "maximize", "fused", "foreach", "decoupled_weight_decay")
    flags = ("amsgrad", "differentiable", "capturable")

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return all(group["fused"] for group in optimizer.param_groups) and super().knows(optimizer)

    def init_state(self, optimizer: torch.optim.Optimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
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
        elif wrong := next((key for key in keys if not isinstance(state.get(key), Tensor)), None):
            raise ValueError(
                f"{type(optimizer).__name__}'s state has {wrong}={state.get(wrong)!r} for a parameter of shape "
                f"{list(param.shape)}, and eager needs a tensor too; store a tensor, or clear that parameter's state"
            )
        elif "master" not in keys and state["exp_avg"].dtype != param.dtype:
            raise ValueError(
                f"a parameter of shape {list(param.shape)} is {param.dtype} and its state in "
                f"{type(optimizer).__name__} {state['exp_avg'].dtype}, which eager refuses too: convert the model "
                "before its first step, or build the optimizer again"
            )
        _check_shape(optimizer, param, state["exp_avg"])
        return {key: state[key] for key in keys}

    def trace(
        self, group: dict[str, Any], members: Sequence[Member], lr: Tensor, attribute: Callable[[str], None], skip: Skip
    ) -> None:
        attribute("")
        _trace_adam(group, members, lr, skip)


def _trace_adam(group: dict[str, Any], members: Sequence[Member], lr: Tensor, skip: Skip) -> None:
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


class SGDRule(Rule):
    """SGD with momentum. With ``fused=True`` one fused node per parameter group; otherwise torch's single-tensor
    formula, bitwise equal to eager on a CPU.

    Eager sets the momentum buffer to the first gradient, and a graph has no first step. A buffer of -0.0 gives the same
    bits: ``momentum * -0.0 + g`` is ``g``, its sign included. Not with dampening, where the optimizer's own ``step`` is
    traced. Source: Sutskever et al., On the importance of initialization and momentum (2013).
    """

    constants = ("momentum", "weight_decay", "nesterov", "maximize", "fused", "foreach")
    flags = ("differentiable", "dampening")

    def init_state(self, optimizer: torch.optim.Optimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if group["momentum"] == 0:
            return {}
        state = optimizer.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            buffer = state["momentum_buffer"]
            (torch.view_as_real(buffer) if buffer.is_complex() else buffer).neg_()
        _check_shape(optimizer, param, state["momentum_buffer"])
        return {"momentum_buffer": state["momentum_buffer"]}

    def trace(
        self, group: dict[str, Any], members: Sequence[Member], lr: Tensor, attribute: Callable[[str], None], skip: Skip
    ) -> None:
        if group["fused"]:
            attribute("")
            _trace_fused_sgd(group, members, lr, skip)
            return
        for member in members:
            attribute(member.path)
            _trace_sgd(group, member, lr, skip)


def _trace_fused_sgd(group: dict[str, Any], members: Sequence[Member], lr: Tensor, skip: Skip) -> None:
    options = {key: group[key] for key in ("weight_decay", "momentum", "nesterov", "maximize")}
    aten._fused_sgd_.tensor_lr(
        [m.param for m in members],
        [m.grad for m in members],
        [m.state["momentum_buffer"] for m in members] if group["momentum"] != 0 else [],
        lr=lr,
        dampening=0.0,
        **options,
        **skip.found_inf(members[0].param.device),
        is_first_step=False,
    )


def _trace_sgd(group: dict[str, Any], member: Member, lr: Tensor, skip: Skip) -> None:
    """One parameter's update in the operators, and the order, of torch's single-tensor SGD."""
    param, grad, state = member.param, member.grad, member.state
    momentum = group["momentum"]
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"] != 0:
        grad = torch.add(grad, param, alpha=group["weight_decay"])
    if momentum != 0:
        buffer = scaled(state["momentum_buffer"], momentum, group["foreach"])
        buffer = torch.add(buffer, grad)
        buffer = buffer.to(state["momentum_buffer"].dtype)  # which a cast of the model leaves
        skip.write(state["momentum_buffer"], buffer)
        grad = torch.add(grad, buffer, alpha=momentum) if group["nesterov"] else buffer
    skip.write(param, add_scaled(param, grad, -lr))


class AdafactorRule(Rule):
    """The second moment of a matrix as one row and one column. Bitwise equal to eager on a CPU, in its single-tensor
    form (torch's default, on CUDA too) and in its foreach form.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018).
    """

    constants = ("beta2_decay", "eps", "d", "weight_decay", "maximize", "foreach")
    complex = False
    shards = False

    def init_state(self, optimizer: torch.optim.Optimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
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
        self, group: dict[str, Any], members: Sequence[Member], lr: Tensor, attribute: Callable[[str], None], skip: Skip
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
            _trace_adafactor(group, member, lr, eps, *factors[member.seen], skip)
            skip.write(member.state["step"], new_step)


def _trace_adafactor(
    group: dict[str, Any], member: Member, lr: Tensor, eps: float, weight: Tensor, rho: Tensor, skip: Skip
) -> None:
    """One parameter's update. ``weight``: of the new second moment. ``rho``: the relative step size. Both fp64."""
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


def _norm(x: Tensor) -> Tensor:
    """The 2-norm, rounded to the dtype of ``x``, as an fp64 scalar."""
    return torch.linalg.vector_norm(x).double()


def _mean_square(grad: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(grad, dim=dim, keepdim=True).square() / grad.size(dim)

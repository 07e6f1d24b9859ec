"""Optimizers as people write them, small."""

import math

import torch
from torch import optim


class Written(optim.Optimizer):
    """An optimizer that updates one parameter after the other by `update`."""

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.01, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)


class Lion(Written):
    """A first moment of zeros, the learning rate in two places, ``.data``."""

    def update(self, p, grad, state, group):
        p.data.mul_(1 - group["lr"] * 0.1)
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        moment = state["exp_avg"]
        p.add_(torch.sign(moment * 0.9 + grad * 0.1), alpha=-group["lr"])
        moment.mul_(0.99).add_(grad, alpha=0.01)


class Momentum(Written):
    """The first gradient is the momentum: the first step is another one than later steps."""

    def update(self, p, grad, state, group):
        if "buffer" not in state:
            state["buffer"] = torch.clone(grad).detach()
        else:
            state["buffer"].mul_(0.9).add_(grad)
        p.add_(state["buffer"], alpha=-group["lr"])


class Counted(Written):
    """Adam with a count that is a Python number, and ``math``."""

    def __init__(self, params, **options):
        super().__init__(params, betas=(0.9, 0.99), eps=1e-8, **options)

    def update(self, p, grad, state, group):
        if not state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(grad)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-size)


class Assigned(Written):
    """State that is replaced in each step."""

    def update(self, p, grad, state, group):
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * grad
        p.sub_(group["lr"] * state["m"])


class Lamb(Written):
    """Norms of whole parameters."""

    def update(self, p, grad, state, group):
        if not state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(p.data), torch.zeros_like(p.data)
        state["step"] += 1
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["m"] / (1 - 0.9 ** state["step"])
        update = update / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6) + 0.1 * p.data
        sizes = p.data.norm(2), update.norm(2)
        ratio = torch.where(sizes[0] > 0, sizes[0] / sizes[1], torch.ones_like(sizes[0]))
        p.data.add_(-group["lr"] * ratio * update)


class ScheduleFree(optim.Optimizer):
    """Counts and sums in parameter groups, ``foreach`` operators, decisions by a count, state that is the parameter."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"]
            warm = (k + 1) / 3 if k < 3 else 1.0
            lr = group["lr"] * warm * math.sqrt(1 - 0.99 ** (k + 1))
            group["lr_max"] = max(lr, group["lr_max"])
            weight = (k + 1) ** 0.0 * group["lr_max"] ** 2.0
            group["weight_sum"] += weight
            weight = weight / group["weight_sum"]
            active = [p for p in group["params"] if p.grad is not None]
            for p in active:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p, memory_format=torch.preserve_format)
            y, grads, z = zip(*((p.data, p.grad, self.state[p]["z"]) for p in active), strict=True)
            torch._foreach_lerp_(y, z, weight=weight)
            torch._foreach_add_(y, grads, alpha=lr * (0.9 * (1 - weight) - 1))
            torch._foreach_sub_(z, grads, alpha=lr)
            group["k"] = k + 1


class OfItself(Written):
    """A count and a factor that are the optimizer's own attributes."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count, self.factor = 0, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        super().step()

    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-group["lr"] * self.factor / self.count)


class Soap(Written):
    """Lists in the state, a first step that only fills it, ``eigh`` and ``qr`` every three steps."""

    def update(self, p, grad, state, group):
        if "step" not in state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(grad), torch.zeros_like(grad)
            state["factors"], state["bases"] = [], None
            for size in grad.shape:
                state["factors"].append(torch.zeros(size, size))
            self.average(grad, state)
            return
        turned = self.turned(grad, state, 0)
        state["step"] += 1
        state["m"].mul_(0.9).add_(turned, alpha=0.1)
        state["v"].mul_(0.99).add_(turned.square(), alpha=1 - 0.99)
        size = group["lr"] * (1 - 0.99 ** state["step"]) ** 0.5 / (1 - 0.9 ** state["step"])
        p.add_(self.turned(state["m"] / state["v"].sqrt().add_(1e-8), state, 1), alpha=-size)
        self.average(grad, state)

    def turned(self, x, state, side):
        for base in state["bases"]:
            x = torch.tensordot(x, base, dims=[[0], [side]])
        return x

    def average(self, grad, state):
        for i, factor in enumerate(state["factors"]):
            others = [axis for axis in range(grad.ndim) if axis != i]
            factor.lerp_(torch.tensordot(grad, grad, dims=[others, others]), 0.05)
        if state["bases"] is None:
            state["bases"] = [torch.linalg.eigh(f + 1e-6 * torch.eye(len(f)))[1] for f in state["factors"]]
        elif state["step"] > 0 and state["step"] % 3 == 0:
            pairs = zip(state["factors"], state["bases"], strict=True)
            state["bases"] = [torch.linalg.qr(factor @ base)[0] for factor, base in pairs]


class AdamMini(Written):
    """A second moment that is one number per parameter, begun as ``torch.tensor(0.0)``."""

    def update(self, p, grad, state, group):
        if not state:
            state["m"], state["step"], state["v"] = torch.zeros_like(p), 0, torch.tensor(0.0)
        state["step"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].mul_(0.99).add_((grad * grad).mean(), alpha=0.01)
        root = (state["v"].sqrt() / math.sqrt(1 - 0.99 ** state["step"])).add_(1e-8)
        p.add_(state["m"] * (1 / (1 - 0.9 ** state["step"]) / root) * -group["lr"])


WRITTEN = {kind.__name__: kind for kind in (Lion, Momentum, Counted, Assigned, Lamb, ScheduleFree, OfItself, Soap)}
WRITTEN["AdamMini"] = AdamMini


def _largest_side(tensor):
    return max(tensor.shape)


class BySize(torch.optim.Optimizer):
    """Its rate depends on the shape of a parameter, which a function of the module reads."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / _largest_side(p))

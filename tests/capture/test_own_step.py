"""Optimizers by their own ``step``, which no formula of stepgraph knows: as eager, bit for bit."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

optim = torch.optim


class Written(optim.Optimizer):
    """An optimizer whose ``step`` updates one parameter after the other by `update`."""

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
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        moment, (beta1, beta2) = state["exp_avg"], group["betas"]
        p.add_(torch.sign(moment * beta1 + grad * (1 - beta1)), alpha=-group["lr"])
        moment.mul_(beta2).add_(grad, alpha=1 - beta2)


ZOO = {
    "lion": functools.partial(Lion, betas=(0.9, 0.99), weight_decay=0.1),
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "nadam": functools.partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "adagrad": functools.partial(optim.Adagrad, lr_decay=0.1),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": functools.partial(optim.ASGD, t0=2),
    "rprop": optim.Rprop,
}


def model():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs(n=2):
    return [{"x": torch.randn(4, 5), "y": torch.randn(4, 5)} for _ in range(n)]


@pytest.mark.parametrize("kind", ZOO.values(), ids=ZOO)
def test_training(check_training, kind):
    check_training(
        model(),
        mse,
        pairs(),
        lambda m: kind(m.parameters(), lr=0.01),
        make_schedule=lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 8),
        max_grad_norm=0.3,
        steps=7,
    )

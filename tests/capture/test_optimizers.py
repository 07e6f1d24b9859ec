"""Every optimizer that a graph can hold, against torch's own, bit for bit."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

optim = torch.optim


class Mixed(nn.Module):
    """Matrices of both orientations, vectors, a kernel of four dimensions, and a parameter of none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.wide, self.tall = nn.Linear(12, 17), nn.Linear(17, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.tall(self.wide(self.conv(x).flatten(1)).tanh()) * self.scale.exp()


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs(dtype=torch.float32, n=2):
    return [{"x": torch.randn(4, 2, 3, 3, dtype=dtype), "y": torch.randn(4, 5, dtype=dtype)} for _ in range(n)]


def muon_and_adamw(model, **options):
    """As people use Muon: it takes the matrices, AdamW the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [optim.Muon(matrices, lr=0.02, **options), optim.AdamW(rest, lr=3e-3)]


def of(kind, **options):
    return lambda model: kind(model.parameters(), **{"lr": 0.01, **options})


KINDS = {
    "adamw": of(optim.AdamW),
    "adam": of(optim.Adam, weight_decay=0.1),
    "adam_fused": of(optim.Adam, weight_decay=0.1, fused=True),
    "adamw_foreach": of(optim.AdamW, foreach=True, weight_decay=0.1),
    "sgd": of(optim.SGD),
    "sgd_momentum": of(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": of(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "sgd_dampened": of(optim.SGD, momentum=0.9, dampening=0.3),
    "sgd_fused": of(optim.SGD, momentum=0.9, fused=True),
    "muon": muon_and_adamw,
    "muon_plain": functools.partial(muon_and_adamw, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "adafactor": of(optim.Adafactor, weight_decay=0.1),
    "adafactor_foreach": of(optim.Adafactor, weight_decay=0.1, foreach=True),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training(check_training, make, dtype):
    if make is KINDS["sgd_fused"] and dtype == torch.bfloat16:
        pytest.skip("torch's kernel reads memory that it has not written, for sizes that no vector divides")
    check_training(Mixed().to(dtype), mse, pairs(dtype), make, max_grad_norm=0.3)


@each_kind
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accumulation(check_training, make, clip):
    check_training(Mixed(), mse, pairs(), make, max_grad_norm=clip, accumulate=2, steps=5)

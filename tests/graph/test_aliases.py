"""Views of numbers: what a complex tensor times a Python number is traced as."""

import pytest
import torch
from torch import nn

import stepgraph


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (torch.complex(y, y) * 1j).real,
        lambda y: (torch.fft.rfft(y) * (1 + 0.5j)).abs(),
        lambda y: torch.complex(y, y).conj() * 1j * torch.complex(y, -y),
        lambda y: torch.sgn(y * 1.0) * y + torch.sgn((y * 1.0).sum()),
    ],
)
def test_numbers_have_views(function):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def loss_fn(model, x):
        return function(model(x)).abs().square().mean()

    loss = loss_fn(model, x)
    (grad,) = torch.autograd.grad(loss, [model.weight])
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    assert torch.equal(step(x), loss) and torch.equal(model.weight.grad, grad)

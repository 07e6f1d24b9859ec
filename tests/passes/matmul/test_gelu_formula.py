"""GELU as people write it: which formulas are found, and the numbers of a step."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.passes import exact, get

aten = torch.ops.aten
C = math.sqrt(2 / math.pi)


class Bloom(torch.autograd.Function):
    """BLOOM's: forward and backward by its authors' formulas."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * grad


FORMULAS = {
    "minGPT": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "cubed": lambda x: x * (1 + (C * (x + 0.044715 * x * x * x)).tanh()) / 2,
    "factored": lambda x: x * 0.5 * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x**2))),
    "bloom": Bloom.apply,
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf, short": lambda x: 0.5 * x * (torch.erf(x / 1.41421) + 1),
    "one minus": lambda x: x - x * 0.5 * (1 - torch.erf(x * 0.70710678)),
}


def source_written(x):
    half, kept = 0.5 * x, x.clone()
    tanh = torch.tanh(C * (kept + 0.044715 * kept**3))
    x.mul_(0.3)
    return half * (1 + tanh)


OTHERS = {
    "its source is written": source_written,
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.05 * torch.pow(x, 3.0)))),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "half": lambda x: x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "another gradient": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))).detach()),
    "read twice": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))) + x,
}


class Model(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(16, 64), nn.Linear(64, 16), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x))).float().square().mean()


def run(activation, passes, dtype=torch.float32, autocast=False):
    torch.manual_seed(0)
    model, batch = Model(activation).to(dtype), 3 * torch.randn(4, 6, 16).to(dtype)

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x)

    step = stepgraph.capture(model, loss_fn, batch, torch.optim.SGD(model.parameters(), lr=0.1), passes=passes)
    losses = torch.stack([step(batch) for _ in range(3)])
    return losses, [p.detach().clone() for p in model.parameters()], step


def own(*dtypes):
    before = [p for p in exact() if not p.terminal]
    return [*before, replace(get("gelu_kernels", least=1, dtypes=dtypes), needs_cuda=False)]


def called(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name):
    losses, weights, _ = run(FORMULAS[name], "exact")
    found, others, step = run(FORMULAS[name], own(torch.float32))
    assert (report := step.report[-1]).name == "gelu_kernels" and report.changed == 2, report
    assert not any(called(step, target) for target in (aten.tanh.default, aten.erf.default))
    torch.testing.assert_close(found, losses, rtol=2e-5, atol=1e-6)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16(name, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    losses, _, _ = run(FORMULAS[name], "exact", dtype, autocast)
    found, _, step = run(FORMULAS[name], own(torch.bfloat16), dtype, autocast)
    assert step.report[-1].changed == 2, step.report
    torch.testing.assert_close(found, losses, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    losses, weights, _ = run(OTHERS[name], "exact")
    found, others, step = run(OTHERS[name], own(torch.float32))
    assert called(step, torch.ops.stepgraph.gelu_rows.default) == 0
    assert called(step, aten.gelu.default) == (name == "read twice" and called(step, aten.gelu_backward.default))
    torch.testing.assert_close(found, losses, rtol=2e-5, atol=1e-6)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-4, atol=2e-6)


def test_a_gelu_in_float64_keeps_its_formula():
    _, _, step = run(FORMULAS["minGPT"], own(torch.float32), torch.float64)
    assert called(step, aten.gelu.default) == 0


@pytest.mark.parametrize("limit", [10.0, 1000.0])
def test_one_that_is_clipped_stays_clipped(limit, monkeypatch):
    """As gelu_10 of transformers: it is GELU of numbers up to 10."""
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda m: list(map(nn.init.normal_, m.parameters())))
    name = next(iter(FORMULAS))
    activation = lambda x: torch.clip(FORMULAS[name](x * limit), -limit, limit)  # noqa: E731
    losses, _, _ = run(activation, "exact")
    found, _, _ = run(activation, own(torch.float32))
    assert losses[0] > limit, "numbers beyond the limit are wanted"
    torch.testing.assert_close(found[:1], losses[:1], rtol=2e-5, atol=1e-6)

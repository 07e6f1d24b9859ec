"""SwiGLU between adapters in one operator: results against fp64, what remains of the graph, and what is left alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.costs.attention import transient_bytes
from stepgraph.passes.order import configured
from tests.passes.matmul.test_lora import Adapted

aten, ours = torch.ops.aten, torch.ops.stepgraph


class Mlp(nn.Module):
    def __init__(self, act=F.silu, **options):
        super().__init__()
        self.gate, self.up = Adapted(16, 40, scale=2.0, **options), Adapted(16, 40, scale=0.5, **options)
        self.down, self.act = Adapted(40, 16, scale=3.0, **options), act

    def forward(self, x):
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, kind=Mlp, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.blocks = nn.ModuleList(kind(**options) for _ in range(2))
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(24).view(2, 12) % 11


def model(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def loss_fn(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def autocast_loss(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, ids)


def run(model, chosen, loss=loss_fn):
    """(step, loss, gradients) of a copy of ``model``."""
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, loss, IDS, passes=chosen)
    value = step(IDS)
    return step, value, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def count(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


def passes(gated=True):
    return [p.with_options(gated=gated) if p.name == "lora" else p for p in configured(inductor="off")]


def cast_first(layer, x):
    """As peft: the adapter's input is cast to its weight's dtype."""
    return layer.base(x) + layer.b(layer.a(x.to(layer.a.weight.dtype))) * layer.scale


@pytest.mark.parametrize("kind", ["bf16", "bias", "autocast", "autocast of casts", "tied adapters", "matrices"])
def test_as_close_to_fp64_as_eager(kind, monkeypatch):
    if kind == "autocast of casts":
        monkeypatch.setattr(Adapted, "forward", cast_first)
    autocast, flat = kind.startswith("autocast"), Flat if kind == "matrices" else Mlp
    made = model(torch.float32 if autocast else torch.bfloat16, bias=kind == "bias", kind=flat)
    if kind == "tied adapters":  # one adapter in two layers
        made.blocks[1].gate.a.weight, made.blocks[1].gate.b.weight = (
            getattr(made.blocks[0].gate, name).weight for name in "ab"
        )
    loss = autocast_loss if autocast else loss_fn
    step, value, grads = run(made, passes(), loss)
    assert count(step, ours.gated_adapters.default) == count(step, ours.gated_adapters_backward.default) == 2
    _, eager_value, eager = run(made, "exact", loss)
    _, true_value, true = run(copy.deepcopy(made).double(), "exact")
    assert abs(value - true_value) <= 2 * abs(eager_value - true_value) + 2e-3
    assert grads.keys() == true.keys()
    for name in true:
        error, own = ((g[name] - true[name]).norm() / true[name].norm() for g in (grads, eager))
        assert error <= 1.5 * own + 2e-3, name


def test_what_remains():
    made = model()
    step, *_ = run(made, passes())
    report = next(r for r in step.report if r.name == "lora")
    assert "2 SwiGLUs between adapters" in report.summary
    assert not any(count(step, target) for target in (aten.silu.default, aten.silu_backward.default, aten.mul.Tensor))
    node = step.graph.graph.find_nodes(op="call_function", target=ours.gated_adapters_backward.default)[0]
    assert node.args[0].meta["val"].shape == (24, 40)
    results = 2 * (2 * 24 * 40 + 2 * 24 * 4 + 3 * 40 * 4)
    assert transient_bytes(node) == results + 2 * (2 * 24 * 4) + 4 * (3 * 40 * 4)  # and parts: one of rows and columns


class Flat(Mlp):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class WithoutDown(Mlp):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(40, 16, bias=False).requires_grad_(False)


class ReadTwice(Mlp):
    def forward(self, x):
        gate = self.gate(x)
        return x + self.down(self.act(gate) * self.up(x)) + gate.mean()


class Wide(Mlp):
    def __init__(self):
        super().__init__(rank=12)
        self.up = Adapted(16, 40, rank=8)


@pytest.mark.parametrize("kind", [WithoutDown, ReadTwice, Wide, "fp32", "gelu"])
def test_what_does_not_fit_is_left(kind):
    options = {"act": F.gelu} if kind == "gelu" else {} if isinstance(kind, str) else {"kind": kind}
    made = model(torch.float32 if kind == "fp32" else torch.bfloat16, **options)
    step, value, grads = run(made, passes())
    assert not count(step, ours.gated_adapters.default)
    _, plain_value, plain = run(made, passes(gated=False))
    assert value == plain_value and all(torch.equal(grads[name], plain[name]) for name in plain)


def written_base(layer, x):
    base = layer.base(x)
    y = base + layer.b(layer.a(x)) * layer.scale
    base[..., 0] = 0.5  # which nothing reads in eager mode
    return y


def written_gradient(layer, x):
    def clear(grad):
        grad[..., 0] = 0

    y = layer.base(x) + layer.b(layer.a(x)) * layer.scale
    y.register_hook(clear)
    return y


@pytest.mark.parametrize("forward", [written_base, written_gradient])
def test_writes_through_views_are_seen(forward, monkeypatch):
    monkeypatch.setattr(Adapted, "forward", forward)
    made = model()
    step, value, grads = run(made, passes())
    assert not count(step, ours.gated_adapters.default)
    _, plain_value, plain = run(made, "exact")
    torch.testing.assert_close(value, plain_value, rtol=1e-2, atol=0)
    for name in plain:
        assert (grads[name] - plain[name]).norm() <= 3e-2 * plain[name].norm(), name

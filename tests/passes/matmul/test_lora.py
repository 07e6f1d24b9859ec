"""The pass lora: results against fp64, the number of products left, and the reason reported for each skipped one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import StepOptions

aten, SUM = torch.ops.aten, torch.ops.stepgraph.sum_products.default


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as peft computes it."""

    def __init__(self, inner, outer, rank=4, scale=2.0, bias=False, dropout=0.0):
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=bias).requires_grad_(False)
        self.a, self.b = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)
        self.scale, self.dropout = scale, nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.dropout(x))) * self.scale


class Block(nn.Module):
    """Three layers of one input, whose ranks and scales differ, and one that reads what they give."""

    def __init__(self, **options):
        super().__init__()
        scales = ((4, 2.0), (6, 0.7), (4, 1.0))
        self.q, self.k, self.v = (Adapted(16, 24, rank, scale, **options) for rank, scale in scales)
        self.o, self.norm = Adapted(24, 16, **options), nn.RMSNorm(16)
        self.norm.weight.requires_grad_(False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.o(torch.sigmoid(self.q(y)) * self.k(y) + self.v(y))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        for frozen in (self.embedding, self.head):
            frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = torch.arange(24).view(2, 12) % 11


def loss_fn(autocast=False):
    def loss(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    return loss


def run(model, passes, loss=None):
    """(step, loss, gradients) of a copy of ``model``."""
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, loss or loss_fn(), BATCH, passes=passes)
    value = step(BATCH)
    return step, value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def model(**options):
    torch.manual_seed(0)
    made = Model(**options)
    for p in made.parameters():
        p.data = p.data.bfloat16().float()  # the same numbers in every dtype
    return made


def report_of(step):
    return next(r for r in step.report if r.name == "lora")


def count(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


ONLY = StepOptions(inductor="off")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast"])
def test_as_close_to_fp64_as_eager(kind, bias):
    plain = model(bias=bias)
    _, right, gradients = run(plain.double(), "exact")
    plain = plain.float() if kind != "bf16" else plain.bfloat16()
    loss = loss_fn(kind == "autocast")
    _, _, eager = run(plain, "exact", loss)
    step, value, found = run(plain, ONLY, loss)
    report = report_of(step)
    assert (report.matched, report.changed) == (8, 8) and not report.notes

    def error(gradients_):
        return sum(
            float((g.double() - gradients[name]).norm() / gradients[name].norm()) for name, g in gradients_.items()
        )

    assert found.keys() == gradients.keys() and all("base" not in name and "norm" not in name for name in found)
    assert error(found) <= 1.3 * error(eager) + 1e-6
    torch.testing.assert_close(value.double(), right.double(), rtol=1e-5 if kind == "fp32" else 1e-2, atol=0)


def test_what_remains():
    """Forward: one first product of q, k and v, and a sum for each layer; no scale and no addition of an adapter."""
    step, _, _ = run(model(), ONLY)
    assert (
        "8 of 8 adapters added by products; 6 first products joined to 2, 6 of their weights' gradients joined; 10"
        in (report_of(step).summary)
    )
    sums = [(len(n.args[0]), (*n.args[3:], 1.0)[0]) for n in step.graph.graph.nodes if n.target is SUM]
    # Forward, and the two products of backward that read dy; then dx of q, k and v in the second block, of o in both.
    expected = [(2, s) for s in (2.0, 0.7, 1.0, 2.0)] + [(1, s) for s in (2.0, 0.7, 2.0) for _ in range(2)]
    assert sorted(sums) == sorted(expected * 2 + [(4, 1.0), (2, 1.0), (2, 1.0)])
    # A products: 2 joined and 2 of o; the head's two; weights' gradients of A: 2 joined and 2, of B with scale 1: 2 x 2
    assert count(step, aten.mm.default) == 4 + 2 + 4 + 4
    scales = [n for n in step.graph.graph.nodes if n.target is aten.mul.Tensor and n.args[1] in (2.0, 0.7)]
    assert scales == []


def test_exact_leaves_them():
    step, _, _ = run(model(), "exact")
    assert all(r.name != "lora" for r in step.report) and count(step, SUM) == 0


def test_a_base_layer_that_trains_too_has_its_gradient():
    plain = model()
    for block in plain.blocks:
        block.q.base.weight.requires_grad_(True)
    _, _, eager = run(plain, "exact")
    _, _, found = run(plain, ONLY)
    assert any("q.base.weight" in name for name in found) and found.keys() == eager.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


def test_dropout_keeps_inputs_apart_and_is_reported():
    plain = model(dropout=0.5)
    results = []
    for passes in ("exact", ONLY):
        torch.manual_seed(1)
        results.append(run(plain, passes))
    (_, _, eager), (step, _, found) = results
    report = report_of(step)
    assert (report.matched, report.changed) == (8, 8)
    assert report.notes == ["8 adapters read another input than their base layer (dropout): not joined"]
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


class Doubled(Adapted):
    """Something else reads what the adapter gives."""

    def forward(self, x):
        low = self.b(self.a(x)) * self.scale
        return self.base(x) + low * torch.sigmoid(low)


def test_an_adapter_of_another_form_is_reported():
    plain = model()
    for block in plain.blocks:
        block.o.__class__ = Doubled
    _, _, eager = run(plain, "exact")
    step, _, found = run(plain, ONLY)
    assert "2 adapters added by an operator of their own: several operators read what it adds" in report_of(step).notes
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


def overwritten(layer, x):
    x = x.clone()
    y = layer.base(x)
    x[:, 0] = 0.5
    return y + layer.b(layer.a(x)) * layer.scale


def read_twice(layer, x):
    low = layer.a(x)
    return layer.base(x) + layer.b(low) * layer.scale + low.square().mean()


def written_low(layer, x):
    low = layer.a(x)
    low[:, 0] = 0.5
    return layer.base(x) + layer.b(low) * layer.scale


def written_gradient(layer, x):
    kept = []
    added = layer.b(layer.a(x))
    y = layer.base(x) + added * layer.scale
    pair = torch.cat([y, y.detach()], dim=-1)
    pair.register_hook(kept.append)  # that of y is a view of this gradient
    added.register_hook(lambda _: kept.append(kept[0][0].zero_()))
    return pair[..., : y.shape[-1]]


def sliced(layer, x):
    return layer.base(x) + F.linear(F.linear(x, layer.a.weight[1:]), layer.b.weight[:, 1:]) * layer.scale


def transposed(layer, x):
    y = layer.base(x) + layer.b(layer.a(x)) * layer.scale
    return y if layer.scale == 1.0 else y + layer.b(layer.a(x.transpose(0, 1))).transpose(0, 1)


@pytest.mark.parametrize("forward", [overwritten, read_twice, written_low, written_gradient, sliced, transposed])
def test_writes_readers_and_other_layouts(forward, monkeypatch):
    monkeypatch.setattr(Adapted, "forward", forward)
    plain = model()
    _, eager_loss, eager = run(plain, "exact")
    _, value, found = run(plain, ONLY)
    torch.testing.assert_close(value, eager_loss)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


def test_without_adapters_it_finds_nothing():
    plain = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 11))
    step, _, _ = run(plain, ONLY)
    assert report_of(step).matched == 0 and count(step, SUM) == 0


def test_fp8_base_layers_keep_their_products_and_adapters_are_joined():
    from stepgraph.passes.order import chosen

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32, bias=False)
            self.q, self.k = (Adapted(32, 64, rank=8) for _ in range(2))

        def forward(self, x):
            y = self.first(x)
            return (self.q(y) * self.k(y)).float().square().mean()

    torch.manual_seed(0)
    plain, x = Wide().bfloat16(), torch.randn(16, 32).bfloat16()
    options = StepOptions(inductor="off", fp8="tensorwise", fp8_skip=("*.a", "*.b"))
    passes = [p.with_options(unprofitable=True) if p.name == "fp8_matmul" else p for p in chosen(options)]
    step = stepgraph.capture(plain, lambda m, x: m(x), x, passes=passes)
    step(x)
    report = report_of(step)
    assert "2 first products joined to 1" in report.summary and "stepgraph.scaled_product" in "".join(report.notes)

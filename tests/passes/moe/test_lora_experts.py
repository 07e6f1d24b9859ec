"""Adapters of experts' weights: the products of rows that take the place of sums with whole weights."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, sort_by_expert
from stepgraph.models import Qwen3MoE, next_token_loss
from stepgraph.options import StepOptions

E, D, F, R = 8, 16, 24, 4
OPTIONS = StepOptions(inductor="off")


class Experts(nn.Module):
    """Two of eight experts for each token, with an adapter added to each weight as `peft` adds it. ``turned``: weights
    are (E, out, in)."""

    def __init__(self, turned, scale=2.0, trained=False):
        super().__init__()
        self.turned, self.scale = turned, scale
        self.inner, self.router = nn.Linear(D, D), nn.Linear(D, E)
        for name, (wide, narrow) in {"up": (D, F), "down": (F, D)}.items():
            shape = (narrow, wide) if turned else (wide, narrow)
            setattr(self, name, nn.Parameter(torch.randn(E, *shape) / 4, requires_grad=trained))
            setattr(self, f"{name}_left", nn.Parameter(torch.randn(E, shape[0], R) / 4))
            setattr(self, f"{name}_right", nn.Parameter(torch.randn(E, R, shape[1]) / 4))

    def _linear(self, rows, name, offsets):
        left, right = getattr(self, f"{name}_left"), getattr(self, f"{name}_right")
        weight = torch.baddbmm(getattr(self, name), left, right, alpha=self.scale)
        return grouped_mm(rows, weight.mT if self.turned else weight, offsets)

    def forward(self, x):
        x = self.inner(x)
        weights, chosen = self.router(x).topk(2)
        order, places, counts = sort_by_expert(chosen, E)
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = self._linear(gather_rows(x, order, places), "up", offsets).relu()
        return combine_rows(self._linear(rows, "down", offsets), places, weights.softmax(-1).float(), order)


def loss_fn(model, x):
    return model(x).float().square().mean()


def gradients(model, x, options=None):
    """(Loss, gradients by name, the captured step) of a copy, run eagerly without ``options``."""
    model, step = copy.deepcopy(model), None
    if options is None:
        loss = loss_fn(model, x)
        loss.backward()
    else:
        step = stepgraph.capture(model, loss_fn, x, passes=options)
        loss = step(x)
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, step


@pytest.mark.parametrize("tokens", [40, 3])  # three tokens leave experts without rows
@pytest.mark.parametrize("turned", [True, False])
def test_nothing_as_large_as_the_weights_is_made(turned, tokens):
    torch.manual_seed(0)
    model, x = Experts(turned), torch.randn(tokens, D)
    loss, right, _ = gradients(model, x)
    found, mine, step = gradients(model, x, OPTIONS)
    report = next(r for r in step.report if r.name == "lora_experts")
    assert (report.matched, report.changed, report.notes) == (2, 2, [])
    assert found == pytest.approx(loss, rel=1e-5) and mine.keys() == right.keys() and "up" not in right
    for name, gradient in right.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    targets = [n.target for n in step.graph.graph.nodes]
    assert torch.ops.aten.baddbmm.default not in targets and torch.ops.aten.bmm.default not in targets
    # In each direction the base's, t or dt, and the product with it; the gradients read the same t and dt.
    assert targets.count(torch.ops.stepgraph.grouped_mm.default) == 2 * 6
    assert targets.count(torch.ops.stepgraph.grouped_mm_weight.default) == 2 * 2
    views = (torch.ops.aten.transpose.int,)
    made = [n for n in step.graph.graph.nodes if n.op == "call_function" and n.target not in views]
    sizes = [n.meta["val"].numel() for n in made if isinstance(n.meta.get("val"), torch.Tensor)]
    assert max(sizes) < E * D * F


def test_bf16_is_as_near_as_eager():
    torch.manual_seed(0)
    model, x = Experts(True), torch.randn(200, D)
    exact = gradients(model.double(), x.double())[1]
    model, x = model.bfloat16(), x.bfloat16()
    eager, mine = gradients(model, x)[1], gradients(model, x, OPTIONS)[1]

    def error(some):
        return sum(float((some[n].double() - g).norm() / g.norm()) for n, g in exact.items())

    assert error(mine) < 1.2 * error(eager)


def test_the_exact_pipeline_keeps_the_sum():
    torch.manual_seed(0)
    model, x = Experts(True), torch.randn(40, D)
    step = stepgraph.capture(model, loss_fn, x, torch.optim.SGD(model.parameters(), lr=0.1), passes="exact")
    assert step.verify(x).bitwise and all(r.name != "lora_experts" for r in step.report)


def test_a_gradient_that_is_read_stays():
    """Weights that are trained themselves need theirs."""
    torch.manual_seed(0)
    model, x = Experts(True, trained=True), torch.randn(40, D)
    right, (_, mine, step) = gradients(model, x)[1], gradients(model, x, OPTIONS)
    assert next(r for r in step.report if r.name == "lora_experts").changed == 2 and "up" in mine
    for name, gradient in right.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_adapters_of_peft_in_our_experts():
    peft, moe_models = pytest.importorskip("peft"), pytest.importorskip("tests.models.moe_models")
    torch.manual_seed(0)
    base = Qwen3MoE(replace(moe_models.QWEN, n_layers=1))
    base.init_weights(0)
    weights = ["experts.gate_up_proj.weight", "experts.down_proj.weight"]
    lora = peft.LoraConfig(r=4, target_modules=[], target_parameters=weights, init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "targets": tokens + 1}
    mine = copy.deepcopy(model)
    next_token_loss(model, batch).backward()
    step = stepgraph.capture(mine, next_token_loss, batch, passes=OPTIONS)
    step(batch)
    assert next(r for r in step.report if r.name == "lora_experts").changed == 2
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    for name, p in mine.named_parameters():
        if name in trained:
            torch.testing.assert_close(p.grad, trained[name], rtol=1e-3, atol=1e-6, msg=name)


class Read(Experts):
    def forward(self, x):
        return super().forward(x) + torch.baddbmm(self.down, self.down_left, self.down_right).sum()

    def _linear(self, rows, name, offsets):
        if name == "up":
            return super()._linear(rows, name, offsets)
        weight = torch.baddbmm(self.down, self.down_left, self.down_right)
        return grouped_mm(rows, weight.mT, offsets) + weight.sum()


def test_what_stays_is_reported():
    torch.manual_seed(0)
    step = gradients(Read(True), torch.randn(40, D), OPTIONS)[2]
    report = next(r for r in step.report if r.name == "lora_experts")
    assert report.changed == 1 and "other operators read the sum" in report.notes[0]

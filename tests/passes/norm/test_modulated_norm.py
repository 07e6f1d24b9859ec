"""Norms that each sequence scales and shifts, with gates: which the pass finds, and the numbers of a step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import Target, configured, exact, get
from stepgraph.passes.runner import unusable

aten, ours = torch.ops.aten, torch.ops.stepgraph


class Block(nn.Module):
    """As `stepgraph.bench.model.written.DiTBlock`, with a switch for each way to write it."""

    def __init__(self, width, form):
        super().__init__()
        self.form, affine = form, form == "affine"
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=affine) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.condition = nn.Linear(width, 6 * width)
        if form == "by token":
            self.by_token = nn.Parameter(torch.zeros(width, 1))  # as many as channels

    def forward(self, x, c):
        given = self.condition(F.silu(c))
        if self.form == "late":
            given = [part.unsqueeze(1) for part in given.chunk(6, -1)]
        else:
            given = given.unsqueeze(1).chunk(6, -1)
        for norm, product, shift, scale, gate in zip(
            self.norms, self.products, given[0:2], given[2:4], given[4:6], strict=True
        ):
            n = norm(x)
            if self.form == "read":
                x = x + 0.1 * n
            if self.form == "norm written":
                n.detach()[..., 0] = 0.5
            by = scale if self.form == "no offset" else 1 + scale
            if self.form == "scale written":
                by[..., 0].fill_(0.5)
            y = n * by + shift
            if self.form == "by token":
                x = x + gate * (F.linear(y, product.weight) + self.by_token)
            elif self.form == "no gate":
                x = x + product(y)
            elif self.form == "frozen":
                x = x + gate.detach() * product(n * (1 + scale.detach()) + shift)
            else:
                x = x + gate * product(y)
        return x


class Model(nn.Module):
    def __init__(self, form, width=24, layers=3):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, form) for _ in range(layers))

    def forward(self, batch):
        x, c = batch
        x = self.first(x)
        for block in self.blocks:
            x = block(x, c)
        return x.float().square().mean()


def run(passes, form="", dtype=torch.float32):
    torch.manual_seed(0)
    tokens = 24 if form == "by token" else 10
    model, batch = Model(form).to(dtype), (torch.randn(3, tokens, 24).to(dtype), torch.randn(3, 24).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepgraph.capture(model, lambda m, x: m(x), batch, optimizer, passes=passes)
    losses = torch.stack([step(batch) for _ in range(3)])
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, step


def own():
    before = [p for p in exact() if not p.terminal]
    return [*before, replace(get("modulated_norm"), needs_cuda=False)]


def called(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target))


def report_of(step):
    return next(report for report in step.report if report.name == "modulated_norm")


@pytest.mark.parametrize("form, gated", [("", 5), ("late", 5), ("no offset", 5), ("no gate", 0)])
def test_norms_are_found_with_their_gates(form, gated):
    losses, weights, _ = run("exact", form)
    found, others, step = run(own(), form)
    report = report_of(step)
    assert report.matched == report.changed == 6 and not report.notes
    assert report.summary == f"6 of 6 norms scaled and shifted by sequence, {gated} with a gate"
    assert called(step, ours.gated_norm_backward.default) == gated  # the first norm follows no gate
    assert called(step, ours.modulated_norm_backward.default) == 6 - gated
    assert not called(step, aten.native_layer_norm_backward.default)
    sums = step.graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    biases = [
        n for n in sums if n.meta["val"].numel() == 24
    ]  # of products: of the gated ones but the last, by the kernel
    assert len(biases) == 1 + 6 - gated
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["norm written", "scale written"])
def test_writes_through_views_are_seen(form):
    losses, weights, _ = run("exact", form)
    found, others, _ = run(own(), form)
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-5)


def test_sums_over_channels_are_no_gradient_of_a_bias():
    losses, weights, _ = run("exact", "by token")
    found, others, step = run(own(), "by token")
    assert called(step, ours.gated_norm_backward.default) == 5
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-5)


def test_bfloat16():
    losses, weights, _ = run("exact", dtype=torch.bfloat16)
    found, others, step = run(own(), dtype=torch.bfloat16)
    assert report_of(step).changed == 6
    torch.testing.assert_close(found, losses, rtol=2e-2, atol=0)
    torch.testing.assert_close(others, weights, rtol=2e-2, atol=4e-3)


def test_forward_keeps_what_is_normalized():
    """Not the normalized rows: backward reads x and its statistics alone."""
    _, _, step = run(own())
    for norm in step.graph.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default):
        rows = next(user for user in norm.users if user.args[1] == 0)
        assert [user.target for user in rows.users] == [aten.mul.Tensor]


STAYS = {"affine": "it has a weight too", "frozen": "its scale and shift have no gradient over tokens"}


@pytest.mark.parametrize("form", STAYS)
def test_what_stays_is_said(form):
    losses, weights, _ = run("exact", form)
    found, others, step = run(own(), form)
    report = report_of(step)
    assert report.changed == 0 and report.matched == 6
    assert all(STAYS[form] in note for note in report.notes)
    assert torch.equal(found, losses) and all(torch.equal(others[name], weights[name]) for name in weights)


def test_other_readers_of_the_normalized_rows():
    """Their gradients go into the norm's too, so that it is no longer one of the scaled rows alone."""
    losses, weights, _ = run("exact", "read")
    found, others, step = run(own(), "read")
    assert report_of(step).changed == 0
    assert torch.equal(found, losses) and all(torch.equal(others[name], weights[name]) for name in weights)


def test_models_without_such_norms():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 3, 8)
    step = stepgraph.capture(model, lambda m, x: m(x).square().mean(), batch, passes=own())
    assert report_of(step).matched == report_of(step).changed == 0


def test_where_it_runs():
    names = [p.name for p in configured()]
    assert names.index("modulated_norm") < names.index("fuse_norm")
    assert unusable(get("modulated_norm"), Target("cpu"))

"""Gradients of queries, keys and values side by side, with the gradient of the bias: which, and a step's numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.passes import Target, configured, exact, get
from stepgraph.passes.runner import unusable

aten, ours = torch.ops.aten, torch.ops.stepgraph


class Attention(nn.Module):
    """One product for queries, keys and values, with fewer heads of the latter if ``kind`` says so."""

    def __init__(self, kind, width=16, heads=4):
        super().__init__()
        self.kind, self.own = kind, heads // 2 if kind == "grouped" else heads
        self.widths = [width, self.own * width // heads, self.own * width // heads]
        self.qkv = nn.Linear(width, sum(self.widths), bias=kind != "no bias")
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.widths, -1)
        if self.kind == "scaled":
            q = q * 2.0
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kind == "grouped")
        return x + self.out(y.transpose(1, 2).flatten(2))


def run(passes, kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Attention(kind), Attention(kind)).to(dtype)
    batch = torch.randn(3, 6, 16).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepgraph.capture(model, lambda m, x: m(x).float().square().mean(), batch, optimizer, passes=passes)
    losses = torch.stack([step(batch) for _ in range(3)])
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, step


def own(**options):
    before = [p for p in exact() if not p.terminal]
    return [*before, replace(get("concat_sums", **{"least": 1, "width": 8, **options}), needs_cuda=False)]


def called(step, target):
    return step.graph.graph.find_nodes(op="call_function", target=target)


def report_of(step):
    return next(report for report in step.report if report.name == "concat_sums")


@pytest.mark.parametrize("kind", ["", "scaled", "grouped"])
def test_a_fused_projection(kind):
    losses, weights, before = run("exact", kind)
    widths = [n.args[0].meta["val"].shape[-1] for n in called(before, aten.sum.dim_IntList)]
    found, others, step = run(own(), kind)
    assert report_of(step).matched == report_of(step).changed == 2
    assert len(called(step, ours.concat_sums.default)) == 2 and not called(step, aten.cat.default)
    left = [n.args[0].meta["val"].shape[-1] for n in called(step, aten.sum.dim_IntList)]
    assert len(left) == len(widths) - 2 and max(left) == 16 < max(widths)
    torch.testing.assert_close(found, losses, rtol=2e-2, atol=0)
    torch.testing.assert_close(others, weights, rtol=2e-2, atol=4e-3)


def test_what_stays():
    assert report_of(run(own(), "no bias")[2]).matched == 0
    for options, dtype in (({"width": 32}, torch.bfloat16), ({"least": 1 << 22}, torch.bfloat16), ({}, torch.float32)):
        report = report_of(run(own(**options), "", dtype)[2])
        assert report.matched == 2 and report.changed == 0 and report.notes[0].startswith("2 stay as they are")
    names = [p.name for p in configured()]
    assert names.index("concat_sums") < names.index("tune_products") and unusable(get("concat_sums"), Target("cpu"))

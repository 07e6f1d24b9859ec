"""GELU between products by our kernels: which are, and the numbers of a step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.passes import Target, configured, exact, get
from stepgraph.passes.runner import unusable

aten, ours = torch.ops.aten, torch.ops.stepgraph


class Conv1D(nn.Module):
    """A linear layer whose weight lies the other way, as GPT-2's of transformers."""

    def __init__(self, width, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.1 * torch.randn(width, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Model(nn.Module):
    def __init__(self, kind, width=16):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(width, 4 * width, bias=kind != "no bias"), nn.Linear(4 * width, width)
        self.up.weight.requires_grad_(kind != "bias alone")  # else only the bias reads the gradient
        if kind == "conv1d":
            self.up, self.down = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        z = self.up(x)
        a = F.gelu(z, approximate="tanh" if self.kind == "tanh" else "none")
        if self.kind == "gated":
            a = a * z
        elif self.kind == "dropout":
            a = F.dropout(a, 0.5)
        elif self.kind == "across":
            a = F.gelu(z.transpose(0, 1).contiguous().transpose(0, 1)).contiguous()
        return self.down(a).float().square().mean()


def run(passes, kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model, batch = Model(kind).to(dtype), torch.randn(4, 6, 16).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepgraph.capture(model, lambda m, x: m(x), batch, optimizer, passes=passes)
    torch.manual_seed(1)
    losses = torch.stack([step(batch) for _ in range(3)])
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, step


def own(**options):
    before = [p for p in exact() if not p.terminal]
    return [*before, replace(get("gelu_kernels", **{"least": 1, **options}), needs_cuda=False)]


def called(step, target):
    return step.graph.graph.find_nodes(op="call_function", target=target)


def report_of(step):
    return next(report for report in step.report if report.name == "gelu_kernels")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["", "tanh", "conv1d", "no bias", "bias alone"])
def test_gelus_between_products(kind, dtype):
    losses, weights, _ = run("exact", kind, dtype)
    found, others, step = run(own(dtypes=(dtype,)), kind, dtype)
    sums = 0 if kind == "no bias" else 1
    assert report_of(step).matched == report_of(step).changed == 2
    assert report_of(step).summary == f"2 of 2 GELUs and GELU gradients, {sums} with the bias gradient's sum of rows"
    ((forward,), (backward,)) = called(step, ours.gelu_rows.default), called(step, ours.gelu_rows_backward.default)
    assert forward.args[1] == backward.args[2] == ("tanh" if kind == "tanh" else "none")
    assert backward.args[3] is (sums == 1)
    assert not any(n.args[0].meta["val"].shape[-1] == 64 for n in called(step, aten.sum.dim_IntList))
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, losses, rtol=rtol, atol=0)
    torch.testing.assert_close(others, weights, rtol=rtol, atol=4e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kind", ["gated", "dropout", "across"])
def test_gelus_with_other_neighbours_stay(kind):
    losses, _, _ = run("exact", kind)
    found, _, step = run(own(), kind)
    assert report_of(step).matched == 2 and report_of(step).changed == 0 and torch.equal(found, losses)
    assert report_of(step).notes[0].startswith("2 left unchanged")


def test_what_stays():
    assert report_of(run(own(least=1 << 22), "")[2]).changed == 0
    assert report_of(run(own(), "", torch.float32)[2]).changed == 0
    names = [p.name for p in configured(epilogues="auto")]
    assert names.index("product_epilogues") < names.index("gelu_kernels") < names.index("tune_products")
    assert unusable(get("gelu_kernels"), Target("cpu"))

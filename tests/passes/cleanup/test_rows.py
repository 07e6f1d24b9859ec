"""Rows that lie channel by channel after a convolution are made contiguous where they begin."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import Target, configured, exact, get
from stepgraph.passes.cleanup.rows import _lies_across, _normalized
from stepgraph.passes.runner import unusable

aten = torch.ops.aten


class Patches(nn.Module):
    """A convolution, positions, and two blocks on a residual stream, as in SigLIP, DiT and Whisper's encoder.
    ``between(x)``: what is done to the first sum."""

    def __init__(self, between=None, norm="layer", width=16):
        super().__init__()
        self.between, self.norm = between, norm
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = x + self.positions
        if self.between is not None:
            x = self.between(x)
        for norm, product in zip(self.norms, self.products, strict=True):
            if self.norm == "layer":
                x = x + F.gelu(product(norm(x)))
            else:
                x = x + product(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        return x.square().mean()


def own():
    return replace(get("contiguous_rows"), needs_cuda=False)


def run(passes, **options):
    torch.manual_seed(0)
    model, batch = Patches(**options), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = stepgraph.capture(model, lambda m, x: m(x), batch, optimizer, passes=passes)
    torch.manual_seed(1)
    losses = torch.stack([step(batch) for _ in range(3)])
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, step


def with_rows():
    return [own(), *(p for p in exact() if not p.terminal)]


def report_of(step):
    return next(report for report in step.report if report.name == "contiguous_rows")


def across(step):
    found = [x for x in map(_normalized, step.graph.graph.nodes) if x is not None]
    assert found
    return sum(map(_lies_across, found))


@pytest.mark.parametrize("norm", ["layer", "composite"])
def test_all_norms_read_contiguous_rows(norm):
    losses, weights, before = run("exact", norm=norm)
    assert across(before) > 1
    found, others, step = run(with_rows(), norm=norm)
    report = report_of(step)
    assert across(step) == 0 and report.changed == 1 and report.matched >= 2
    assert report.summary.endswith("made contiguous, by 1 copies")
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(others, weights)


def test_rows_that_are_contiguous_stay():
    _, _, step = run(with_rows(), between=lambda x: x.contiguous())
    assert report_of(step).matched == report_of(step).changed == 0
    assert not step.graph.graph.find_nodes(op="call_function", target=aten.add_.Tensor)


def written(x):
    moved = x.transpose(1, 2).contiguous().transpose(1, 2)  # a tensor of its own, channel by channel too
    later = moved * 2.0
    moved.mul_(0.5)
    return later + moved


class Direct(Patches):
    """A norm reads the convolution's result itself, as in ConvNeXt."""

    def forward(self, pixels):
        return self.norms[0](self.patches(pixels).permute(0, 2, 3, 1)).square().mean()


def test_a_norm_of_a_view_stays():
    torch.manual_seed(0)
    model, batch = Direct(), torch.randn(2, 3, 8, 8)
    step = stepgraph.capture(model, lambda m, x: m(x), batch, passes=with_rows())
    assert report_of(step).matched == report_of(step).changed == 0 and across(step) == 1


STAYS = {
    "draws numbers in the order of memory": lambda x: F.dropout(x, 0.5),
    "does not take it": lambda x: x + x.transpose(1, 2).view(2, -1).sum(1).view(2, 1, 1),
    "it is written": written,
}


@pytest.mark.parametrize("why", STAYS)
def test_what_cannot_be_made_contiguous_stays(why):
    losses, weights, _ = run("exact", between=STAYS[why])
    found, others, step = run(with_rows(), between=STAYS[why])
    report = report_of(step)
    assert any(why in note for note in report.notes), report.notes
    assert torch.equal(found, losses)
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def test_where_it_runs():
    assert "contiguous_rows" in [p.name for p in configured()] and unusable(get("contiguous_rows"), Target("cpu"))
    assert get("contiguous_rows").tier == "numerics"

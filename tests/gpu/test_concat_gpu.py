"""Concatenations written part by part on a GPU: what a step computes, and how long its gated layer takes."""

import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.bench.harness import times

ROWS, WIDTH, HIDDEN = 16384, 1024, 2624


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.halves = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.halves(x).chunk(2, -1)
        x = x + self.out(F.gelu(gate) * up)
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, -1).unbind(-2)
        return q.sin() * k.cos() + v


def mean_square(model, x):
    return model(x).float().square().mean()


def captured(disable):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, x = Gated().bfloat16(), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return stepgraph.capture(model, mean_square, x, optimizer, disable=disable), x


def test_the_same_losses_in_less_time():
    plain, x = captured(("concat_in_place",))
    written, _ = captured(())
    report = next(report for report in written.report if report.name == "concat_in_place")
    assert report.changed == 2
    losses = [[step(x).item() for _ in range(6)] for step in (plain, written)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=2e-3, atol=0)
    took = [sorted(times(torch.device("cuda"), lambda step=step: step(x), 20))[10] for step in (plain, written)]
    print(f"by torch.cat {took[0]:.3f} ms, in place {took[1]:.3f} ms")
    assert took[1] < took[0]

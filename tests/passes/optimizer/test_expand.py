"""Updates written out as arithmetic, and what the pass says of those that it leaves."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import get

EXPAND = replace(get("expand_optimizer"), needs_cuda=False)  # on a GPU it pays; its arithmetic is the same here
aten = torch.ops.aten


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_fused_adam_written_out(kind, weight_decay):
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    eager = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    model = copy.deepcopy(eager)
    ours, theirs = (
        kind(m.parameters(), lr=0.01, weight_decay=weight_decay, maximize=True, fused=True) for m in (model, eager)
    )
    step = stepgraph.capture(model, mse, batch, ours, passes=["inplace_update", EXPAND])
    assert step.report[-1].changed == 4 and not step.report[-1].notes
    assert not any("_fused_" in str(node.target) for node in step.graph.nodes())
    for _ in range(5):
        step(batch)
        mse(eager, batch).backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_other_updates_are_named():
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    optimizers = [
        torch.optim.Muon([model[0].weight, model[2].weight]),
        torch.optim.AdamW([model[0].bias, model[2].bias], fused=True),
    ]
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    step = stepgraph.capture(model, mse, batch, optimizers, passes=["inplace_update", EXPAND])
    report = step.report[-1]
    assert report.changed == 2
    assert "2 parameters are updated by other operators" in report.notes[0]

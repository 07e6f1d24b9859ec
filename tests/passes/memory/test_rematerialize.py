"""`rematerialize` is exact, whatever the rows of products are."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.passes import get


class Wave(nn.Module):
    """Backward reads the sine, the exponential and the cast, all of which come of the input alone."""

    def forward(self, x):
        wide = x.float()
        return (wide.sin() * wide.exp()).to(x.dtype)


def loss_fn(model, batch):
    return model(batch).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1020, 1032, 1155])
def test_gradients_are_those_of_eager(width, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), Wave(), nn.Linear(width, 16)).to(dtype)
    eager, batch = copy.deepcopy(model), torch.randn(4, 16, dtype=dtype)
    step = stepgraph.capture(model, loss_fn, batch, passes=[replace(get("rematerialize"), needs_cuda=False)])
    expected = loss_fn(eager, batch)
    expected.backward()
    assert torch.equal(step(batch), expected)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    (report,) = step.report
    assert report.changed

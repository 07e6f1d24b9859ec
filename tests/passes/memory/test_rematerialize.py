"""`rematerialize` leaves a step alone whose wide products have ragged rows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.passes import get


def loss_fn(model, batch):
    return model(batch).float().square().mean()


def mlp(width, dtype):
    return nn.Sequential(nn.Linear(16, width), nn.GELU("tanh"), nn.Linear(width, 16)).to(dtype)


@pytest.mark.parametrize(
    ("width", "dtype", "skipped"),
    [
        (1028, torch.bfloat16, True),
        (1032, torch.bfloat16, False),
        (1028, torch.float32, False),
        (1030, torch.float32, True),
        (1020, torch.bfloat16, False),  # Inductor pads no rows of up to 1,024 elements
    ],
)
def test_ragged_rows(width, dtype, skipped):
    batch = torch.randn(4, 16, dtype=dtype)
    passes = [replace(get("rematerialize"), needs_cuda=False)]
    step = stepgraph.capture(mlp(width, dtype), loss_fn, batch, passes=passes)
    (report,) = step.report
    assert bool(report.skipped) is skipped
    assert (report.provides == ("rematerialized",)) is not skipped
    if skipped:
        assert f"{width} x {dtype.itemsize} bytes, no multiple of 16" in report.line()

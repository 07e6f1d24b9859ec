"""`stepgraph.metric`: what a loss or a module reports becomes an output of the step, with eager's bits."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.python.metrics import collected


class Reporting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        stepgraph.metric("norm", y.norm())
        y = y * 2
        stepgraph.metric("positive", (y > 0).sum())
        return y


def loss_fn(model, x):
    y = model(x)
    loss = y.square().mean()
    stepgraph.metric("rows", y.sum(dim=1))
    stepgraph.metric("before", loss)
    loss.mul_(0.5)  # a metric is what it was when it was reported
    return loss


def step_of(loss=loss_fn, **options):
    torch.manual_seed(0)
    model = Reporting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return stepgraph.capture(model, loss, torch.randn(6, 4), optimizer, passes="exact", **options)


def test_values_are_those_of_eager():
    step = step_of()
    for seed in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        with collected() as eager:
            loss = loss_fn(step.spec.model, x)
        assert step(x) == loss
        assert {name: value.tolist() for name, value in step.metrics.items()} == {
            name: value.tolist() for name, value in eager.items()
        }
        assert list(eager) == ["norm", "positive", "rows", "before"]


def test_accumulation_gives_the_mean_over_microbatches():
    step, x = step_of(accumulate=3, max_grad_norm=1.0), torch.randn(6, 4)
    found = []
    for part in x.split(2):
        with collected() as eager:
            loss_fn(step.spec.model, part)
        found.append(eager)
    assert step.verify(x).bitwise
    step(x)
    assert step.metrics["positive"] == torch.stack([f["positive"].float() for f in found]).mean()
    assert torch.equal(step.metrics["rows"], torch.stack([f["rows"] for f in found]).mean(dim=0))
    assert step.metrics["grad_norm"] > 0


def test_under_checkpoint_a_metric_is_reported_once():
    def loss(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).mean()

    step, x = step_of(loss), torch.randn(6, 4)
    assert step.verify(x).bitwise
    step(x)
    assert step.metrics["norm"] > 0


def test_outside_a_capture_it_does_nothing():
    assert stepgraph.metric("loss", torch.ones(())) is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("norm", torch.ones(()), "'norm' was reported already"), ("grad_norm", torch.ones(()), "'grad_norm' is a name"),
     ("other", 1.0, "'other' was given a float")],
)  # fmt: skip
def test_refused_names_and_values(name, value, said):
    def loss(model, x):
        y = model(x).mean()
        stepgraph.metric(name, value)
        return y

    with pytest.raises(stepgraph.CaptureError, match=said):
        step_of(loss)

"""What eager refuses for the values of its tensors, a captured step refuses when it runs."""

import copy

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional as F

import stepgraph

PLACES = torch.arange(4)

#: A loss of the model's output and ``v``, values that eager takes, and values that it refuses.
CHECKS = {
    "one_hot": (lambda y, v: y * F.one_hot(v, 4), PLACES, PLACES + 1),
    "one_hot_negative": (lambda y, v: y * F.one_hot(v, 4), PLACES, PLACES - 1),
    "one_hot_any": (lambda y, v: y * F.one_hot(v).sum(1, keepdim=True), PLACES, PLACES - 1),
    "one_hot_of_greatest": (lambda y, v: y * F.one_hot(v.max(), 4), PLACES, PLACES + 1),
    "quantile": (lambda y, v: y.quantile(v), PLACES / 4, PLACES / 4 - 0.1),
    "nanquantile": (lambda y, v: torch.nanquantile(y, q=v), PLACES / 4, PLACES / 4 - 0.1),
    "parameter": (lambda y, v: distributions.Normal(y, v).rsample(), PLACES + 1.0, PLACES - 1.0),
    "sample": (lambda y, v: distributions.Categorical(logits=y).log_prob(v), PLACES, PLACES + 1),
    "asked_for": (
        lambda y, v: distributions.Bernoulli(logits=y, validate_args=True).log_prob(v),
        PLACES % 2.0,
        PLACES * 1.0,
    ),
    "matrix": (
        lambda y, v: distributions.MultivariateNormal(y, v.diag() + y.T @ y / 8).log_prob(y.detach()),
        PLACES + 1.0,
        PLACES - 2.0,
    ),
    "geometric": (lambda y, v: distributions.Geometric(v * 0.2).log_prob(PLACES) * y, PLACES + 1.0, PLACES * 1.0),
    "variance": (lambda y, v: F.gaussian_nll_loss(y, y.detach() + 1, v.expand(4, 4)), PLACES + 1.0, PLACES - 1.0),
    "check_all": (lambda y, v: (torch._check_tensor_all(v < 1.0), y)[1], PLACES / 4, PLACES / 2),
}


@pytest.fixture(autouse=True)
def checking(monkeypatch):
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)  # torch.compile turns it off for good


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("check", CHECKS)
def test_values_that_eager_refuses_are_refused(check, accumulate):
    function, good, bad = CHECKS[check]

    def loss_fn(model, batch):
        return function(model(batch["x"]), batch["v"].squeeze(0)).square().mean()

    torch.manual_seed(0)
    eager, model = (nn.Linear(4, 4) for _ in range(2))
    model = copy.deepcopy(eager)
    batch = {"x": torch.randn(4 * accumulate, 4), "v": good.expand(accumulate, 4)}
    step = stepgraph.capture(model, loss_fn, batch, passes="exact", accumulate=accumulate)
    torch.manual_seed(1)
    expected = sum(loss_fn(eager, {k: t.chunk(accumulate)[i] for k, t in batch.items()}) for i in range(accumulate))
    torch.manual_seed(1)
    assert torch.equal(step(batch), expected.detach() / accumulate)

    batch["v"] = bad.expand(accumulate, 4)
    with pytest.raises((ValueError, RuntimeError)):
        loss_fn(eager, {k: t.chunk(accumulate)[0] for k, t in batch.items()})
    with pytest.raises((ValueError, RuntimeError), match=r"Class values|q values|outside what|all elements|negative"):
        step(batch)


def test_places_of_a_choice_cost_no_check():
    def loss_fn(model, x):
        y = model(x)
        chosen = F.one_hot(y.topk(2).indices.view(-1, 2), 4).sum(1) + F.one_hot(y.sort(0)[1][:, 0], 8)[:, :4]
        return (y * (chosen + F.one_hot(y.argmax(1), num_classes=4))).mean()

    step = stepgraph.capture(nn.Linear(4, 4), loss_fn, torch.randn(8, 4), passes="exact")
    assert "_assert_async" not in step.graph.text()


def test_default_passes_keep_the_check_and_compile_one_piece():
    step = stepgraph.capture(
        nn.Linear(4, 4), lambda m, b: (m(b[0]) * F.one_hot(b[1], 4)).mean(), [torch.randn(4, 4), PLACES]
    )
    assert "in 1 compiled piece" in next(report.summary for report in step.graph.log if report.name == "inductor")
    step([torch.randn(4, 4), PLACES])
    with pytest.raises(RuntimeError, match="Class values must be smaller"):
        step([torch.randn(4, 4), PLACES + 1])

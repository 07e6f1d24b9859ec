"""State outside the model that forward and the loss read or change: followed, or refused."""

import collections
import functools
import itertools
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from tests.capture.python.test_watched import Holder, plain_loss


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.dropout, self.norm = (
            nn.Linear(4, 4),
            nn.Dropout(0.5),
            nn.BatchNorm1d(4, track_running_stats=False),
        )
        self.register_buffer("weights", torch.rand(4))
        self.requires_grad_(False)

    def forward(self, x):
        return self.dropout(self.net(x)) * self.weights


OUTSIDE = {
    "in place": lambda t: t.net.weight.mul_(2),
    "data": lambda t: setattr(t.net.weight, "data", t.net.weight.data * 2),
    "loaded": lambda t: t.load_state_dict({k: v * 2 for k, v in t.state_dict().items()}),
    "assigned": lambda t: t.load_state_dict({k: v * 2 for k, v in t.state_dict().items()}, assign=True),
    "eval": lambda t: t.eval(),
    "buffer replaced": lambda t: setattr(t, "weights", torch.rand(4) + 2),
    "buffer deleted": lambda t: t.register_buffer("weights", torch.ones(4)),
    "layer replaced": lambda t: setattr(t, "net", nn.Linear(4, 4).requires_grad_(False)),
    "hook": lambda t: t.net.register_forward_hook(lambda m, a, y: y * 3) and None,
    "option": lambda t: setattr(t.dropout, "p", np.float64(0.0)),
    "method": lambda t: setattr(t, "forward", lambda x: t.net(x) * 5),
    "dtype": lambda t: t.double(),
}


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize("held", ["closure", "object"])
def test_a_module_outside_of_the_model(kind, held):
    teacher, change = Teacher(), OUTSIDE[kind]
    if kind not in ("eval", "option"):
        teacher.eval()
    if held == "closure":

        def loss_fn(model, x):
            with torch.no_grad():
                target = teacher(x.to(teacher.net.weight.dtype)).float()
            return (model(x) - target).square().mean()

    else:
        trainer = types.SimpleNamespace(reference=[teacher])

        def loss_fn(model, x, trainer=trainer):
            with torch.no_grad():
                target = trainer.reference[0](x.to(teacher.net.weight.dtype)).float()
            return (model(x) - target).square().mean()

    def changed():
        with torch.no_grad():
            change(teacher)

    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for todo in (lambda: None, changed, lambda: None):
        todo()
        torch.manual_seed(1)
        expected = loss_fn(model, x).detach()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(step(x), expected)


# ---- what the loss itself changes ----


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.history, self.by_name = 0, [], {}

    def forward(self, y):
        self.count += 1
        return y.square().mean() * (self.count > 100)


class Logging(Counting):
    def forward(self, y):
        self.history.append(y.detach().mean())
        return y.square().mean()


class Noting(Counting):
    def forward(self, y):
        self.by_name[len(self.by_name)] = float(len(y))
        return y.square().mean()


@pytest.mark.parametrize("kind", [Counting, Logging, Noting])
def test_what_the_loss_changes_outside_of_the_model_is_refused(kind):
    criterion, x, model = kind(), torch.randn(3, 4), nn.Linear(4, 4)
    before = [dict(vars(criterion)), dict(criterion._buffers), list(criterion.history)]
    with pytest.raises(CaptureError, match=r"the loss (keeps a tensor of the step in|sets) [a-zA-Z_]+\.\w+") as caught:
        stepgraph.capture(model, lambda m, b: criterion(m(b)), x, passes="exact")
    assert "\n" not in str(caught.value)
    assert before == [dict(vars(criterion)), dict(criterion._buffers), criterion.history]
    criterion(model(x))  # no fake tensor is left


def test_a_norm_outside_of_the_model_reads_or_writes_its_statistics():
    teacher, model, x = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, lambda m, b: (m(b) - teacher.eval()(b)).square().mean(), x, passes="exact")
    assert step.verify(x).bitwise
    assert not teacher.running_mean.any()
    step = stepgraph.capture(model, lambda m, b: (m(b) - teacher.train()(b)).square().mean(), x, passes="exact")
    assert step.verify(x).bitwise
    step(x)
    assert torch.allclose(teacher.running_mean, 0.1 * x.mean(0))


class Counter:
    count = 0


def test_a_count_in_a_class_is_refused_and_set_back():
    def loss_fn(model, x):
        Counter.count += 1
        return model(x).mean() * Counter.count

    with pytest.raises(CaptureError, match=r"Counter.count counts in Python: 0 -> 1"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, torch.randn(3, 4), passes="exact")
    assert Counter.count == 0


class Registry(collections.OrderedDict):
    """Gives out an object of the class that it holds, as the activations of transformers do."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


def test_a_registry_that_makes_what_it_gives_out_is_left_as_it_was():
    registry = Registry(silu=nn.SiLU)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, lambda m, b: registry["silu"](m(b)).square().mean(), x, passes="exact")
    assert step.verify(x).bitwise and list(dict.values(registry)) == [nn.SiLU]


def test_a_cache_is_left_without_fake_tensors():
    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n).triu()

    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    step = stepgraph.capture(model, lambda m, b: (m(b) * mask(len(b))).square().mean(), x, passes="exact")
    assert not mask.cache_info().currsize and step.verify(x).bitwise


@pytest.mark.parametrize(
    "held",
    [iter([1.0, 2.0]), itertools.count(), (i for i in range(3)), np.ones(1 << 20)],
    ids=["iterator", "count", "generator", "large array"],
)
def test_what_cannot_be_watched_is_refused_in_exact_and_told_of_in_default(held):
    def loss_fn(model, x):
        return model(x).square().mean() * (float(held[0]) if isinstance(held, np.ndarray) else next(held))

    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"the step reads loss_fn\.held, a"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, x, passes="exact")
    with pytest.warns(UserWarning, match=r"the step reads loss_fn\.held, a"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, x, passes=stepgraph.StepOptions(inductor="off"))


def test_a_value_that_changes_in_every_step_is_told_with_advice():
    model, x = Holder(1.0), torch.randn(3, 4)
    step = stepgraph.capture(model, plain_loss, x, passes="exact")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(6):
            model.held = np.float64(i + 2)
            assert torch.equal(step(x), plain_loss(model, x).detach())
    assert len(told) == 3 and "held has changed 3 times" in str(told[2].message)

"""What forward leaves in modules: tensors that it keeps in plain attributes, and conversions of what they have."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import stepgraph
from stepgraph import CaptureError


class Balanced(nn.Module):
    """Keeps ``kept(y)`` for the loss."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept, self.aux, self.seen = nn.Linear(4, 4), kept, None, {}
        self.linear.register_forward_hook(lambda *given: self.seen.update(hidden=given[-1]))

    def forward(self, x):
        y = self.linear(x)
        self.aux = self.kept(self, y)
        return y.tanh()


def loss_fn(model, x):
    y = model(x)
    return y.square().mean() + sum(part.abs().mean() for part in (model.aux, model.seen["hidden"]))


def test_what_the_loss_reads_of_a_module_in_the_same_step(check_training):
    model = Balanced(lambda self, y: y.softmax(-1))
    with pytest.warns(UserWarning, match=r"of the step in model\.aux, model\.seen, and .* does not update these"):
        step = stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes="exact")
    assert model.aux is None and model.seen == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no capture after eager calls, which keep others
        for rows in (3, 5):
            model(torch.randn(rows, 4))
            assert step.verify(torch.randn(3, 4)).bitwise
    assert model.aux.requires_grad and model.seen


@pytest.mark.parametrize("read", [lambda old, y: y + old.sum(), lambda old, y: y if old.max() > 2 else y * 2])
def test_what_the_next_call_reads_is_refused(read):
    model = Balanced(lambda self, y: y if self.aux is None else read(self.aux, y))
    with pytest.raises(CaptureError, match=r"of the step in .*model\.aux.* and its next call reads one") as e:
        stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes="exact")
    assert "\n" not in str(e.value) and model.aux is None and model.seen == {}
    loss_fn(model, torch.randn(3, 4))  # nothing of the trace is left


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", [weight_norm, spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)])
def test_older_utilities_that_compute_a_weight_before_each_call(of):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    of(model[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = stepgraph.capture(model, lambda m, x: m(x).square().sum(), torch.randn(3, 4), optimizer, passes="exact")
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        step(torch.randn(3, 4))
        assert step.verify(torch.randn(3, 4)).bitwise
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Router(nn.Module):
    """Converts its classifier in each forward, as routers of Switch Transformers do."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.classifier = dtype, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.dtype))


def test_a_conversion_in_forward_that_changes_nothing():
    step = stepgraph.capture(Router(torch.float32), lambda m, x: m(x).sin().mean(), torch.randn(3, 4), passes="exact")
    assert step.verify(torch.randn(3, 4)).bitwise
    with pytest.raises(CaptureError, match=r"the model \(.*test_kept.*float32 tensor of Sequential.*convert it"):
        stepgraph.capture(Router(torch.float64), lambda m, x: m(x).mean(), torch.randn(3, 4), passes="exact")


class Recording(nn.Module):
    """Installs hooks in its first call, as transformers does for hidden states, and notes that it has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.found, self.installed = [], False

    def forward(self, x):
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, out: self.found.append(out))
            self.installed = True
        self.layers(x)
        found = list(self.found)
        self.found.clear()
        return found


@pytest.mark.parametrize("outside", [False, True])
def test_hooks_that_the_first_call_installs_are_there_once(outside):
    model, teacher = Recording(), Recording().requires_grad_(False)

    def loss_fn(model, x):
        targets = teacher(x) if outside else [x] * 3
        return sum((y - target).square().mean() for y, target in zip(model(x), targets, strict=True))

    step = stepgraph.capture(model, loss_fn, torch.randn(2, 4), passes="exact")
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        captured = step(x)
        plain = copy.deepcopy(model)
        assert captured == loss_fn(plain, x)
        assert len(plain(x)) == len(teacher(x)) == 3
    assert not model.installed and all(not layer._forward_hooks for layer in model.layers)

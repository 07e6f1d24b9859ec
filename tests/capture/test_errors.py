"""What cannot be captured fails at capture, in one line that names module and source line; the model stays the same."""

import gc
import inspect
import re

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError

OUTSIDE = torch.ones(4, requires_grad=True)


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("empty", None)
        self.plain = torch.zeros(())
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        return self.function(self, self.linear(x))


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Inner(function)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, x):
    return model(x).sum()


def refuse(function, loss_fn=loss_fn, batch=None, error=CaptureError, optimizer=None, **options):
    """Capture a model that applies ``function``; it must fail and leave everything as it was. The message."""
    model = Model(function)
    before = snapshot(model)
    optimizer = optimizer and optimizer(model)
    batch = torch.randn(3, 4) if batch is None else batch
    rng = torch.get_rng_state()
    with pytest.raises(error) as caught:
        stepgraph.capture(model, loss_fn, batch, optimizer, **options)
    assert gc.isenabled()
    assert torch.equal(rng, torch.get_rng_state())
    assert optimizer is None or not optimizer.state
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] or before[key] == after[key] for key in before)
    message = str(caught.value)
    assert "\n" not in message
    return message


def snapshot(model):
    """Everything a module holds, by identity; hooks by their number."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            found[path, key] = len(value) if key.endswith("hooks") else id(value)
        for kind in ("_parameters", "_buffers"):
            for key, value in getattr(module, kind).items():
                found[path, kind, key] = (id(value), value is not None and value._version)
        for p in module.parameters(recurse=False):
            found[path, id(p), "grad"] = id(p.grad)
    return found


def item(self, x):
    return x * x.sum().item()


def branch(self, x):
    if x.sum() > 0:
        return x
    return -x


def nonzero(self, x):
    return x[x.nonzero()[:, 0]]


def mask(self, x):
    return x[x > 0]


def tolist(self, x):
    return x * x.tolist()[0][0]


def numpy(self, x):
    return x * torch.from_numpy(x.detach().numpy())


def integer(self, x):
    return x * int(x.sum())


def assertion(self, x):
    assert (x < 1e9).all()
    return x


def formatted(self, x):
    return x * float(f"{x.sum():.3f}")


def cond(self, x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def unique(self, x):
    return x * torch.unique(x.detach()).numel()


@pytest.mark.parametrize(
    "function", [item, branch, nonzero, mask, tolist, numpy, integer, assertion, unique, formatted, cond]
)
@pytest.mark.parametrize("fused", [False, True])
def test_values_of_tensors(function, fused):
    message = refuse(function, optimizer=lambda m: torch.optim.AdamW(m.parameters(), fused=fused), max_grad_norm=1.0)
    lines, first = inspect.getsourcelines(function)
    path, file, line = re.match(r"cannot capture (\S+) at (.+):(\d+): ", message).groups()
    assert path == "layers.1"
    assert file == __file__
    assert first < int(line) <= first + len(lines)
    assert int(line) == first + 1  # the offending line, not the one before


def keep(self, x):
    self.cache = x
    return x


def keep_in_list(self, x):
    self.history = [x]
    return x


def keep_in_new_buffer(self, x):
    self.register_buffer("late", x.detach())
    return x


def keep_in_empty_buffer(self, x):
    self.empty = x.detach()
    return x


@pytest.mark.parametrize("function", [keep, keep_in_list, keep_in_new_buffer, keep_in_empty_buffer])
def test_tensors_kept_by_a_module(function):
    assert "module layers.1 keeps a tensor of the step in" in refuse(function)


def test_write_into_a_plain_attribute():
    """torch itself would write into the user's tensor while it traces."""

    def count(self, x):
        self.plain.add_(1)
        return x * self.plain

    assert re.search(r"layers.1 \(.*test_errors.py:\d+\) writes into a tensor that is neither", refuse(count))


def test_memory_of_a_parameter_replaced():
    def replace(self, x):
        self.linear.weight.data = self.linear.weight.data * 0.5
        return x

    assert "forward assigns layers.1.linear.weight.data" in refuse(replace)


def test_what_torch_says_gets_a_place():
    def fails(self, x):
        return x @ x.new_zeros(5, 5)

    with pytest.raises(RuntimeError) as caught:
        stepgraph.capture(Model(fails), loss_fn, torch.randn(3, 4), passes="exact")
    (note,) = caught.value.__notes__
    assert re.search(r"raised in layers.1 \(.*test_errors.py:\d+\) while the step was traced", note)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_buffer_that_changes_its_form(value):
    def change(self, x):
        self.mean = value + 0
        return x

    message = refuse(change)
    assert "forward replaces layers.1.mean, a torch.float32 tensor of shape [4]" in message


def test_tensor_from_outside_that_requires_a_gradient():
    message = refuse(lambda self, x: x * OUTSIDE)
    assert re.search(
        r"a tensor of shape \[4\] that requires a gradient is used in layers.1 \(.*test_errors.py", message
    )


def test_cached_copy_of_a_parameter():
    model = Model(lambda self, x: x)
    cached = list(model.parameters())
    with pytest.raises(CaptureError, match="use no cached copy of a parameter"):
        stepgraph.capture(model, lambda m, x: m(x).sum() + sum(p.sum() for p in cached), torch.randn(3, 4))


def same(self, x):
    return x


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, x: m(x), r"a torch.float32 tensor of shape \[3, 4\]; it must return a floating-point scalar"),
        (lambda m, x: m(x).sum().long(), "it must return a floating-point scalar"),
        (lambda m, x: 3.0, "loss_fn returned a float"),
        (lambda m, x: (m(x).sum(), 1), "loss_fn returned a tuple"),
        (lambda m, x: m(x).sum().detach(), "depends on no parameter that requires a gradient"),
        (lambda m, x: x.sum(), "depends on no parameter"),
    ],
)
def test_losses(loss_fn, message):
    assert re.search(message, refuse(same, loss_fn=loss_fn))


def test_optimizer_of_another_model():
    other = Model(same)
    message = refuse(same, optimizer=lambda m: torch.optim.AdamW(other.parameters()))
    assert "build the optimizer from model.parameters()" in message


def test_autocast_around_capture():
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on around capture" in refuse(same)


@pytest.mark.parametrize("accumulate", [2, 5])
def test_microbatches_that_do_not_divide(accumulate):
    message = refuse(same, accumulate=accumulate, error=ValueError)
    assert f"accumulate={accumulate} does not divide the batch's first dimension 3; try accumulate=" in message


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, "2"])
def test_microbatches_are_a_whole_number_from_one_on(accumulate):
    message = refuse(same, accumulate=accumulate, error=ValueError)
    assert f"accumulate={accumulate!r} is not allowed" in message and "from 1 on" in message


def test_batch_of_an_object():
    message = refuse(same, loss_fn=lambda m, b: m(b["x"]).sum(), batch={"x": torch.randn(3, 4), "o": object()})
    assert "the batch holds a object; allowed: tensors and plain values" in message


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks(register):
    model = Model(same)
    getattr(model.layers[1].linear.weight, register)(lambda _: None)
    with pytest.raises(CaptureError, match=r"parameter layers\.1\.linear\.weight has a gradient hook"):
        stepgraph.capture(model, loss_fn, torch.randn(3, 4))


def test_mistakes_of_the_model_pass_through():
    """An error that eager raises too keeps its type."""
    message = refuse(lambda self, x: x.view(5), error=RuntimeError)
    assert "shape '[5]' is invalid" in message


def test_the_model_is_as_before_after_success_too():
    def count(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x

    model = Model(count)
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model)
    stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes="exact")
    assert before == snapshot(model)


def test_unknown_passes():
    assert "did you mean 'recompute'" in refuse(same, passes=["recompote"], error=ValueError)
    assert "did you mean 'inductor'" in refuse(same, disable=["inducter"], error=ValueError)
    assert "unknown passes 'fast'" in refuse(same, passes="fast", error=ValueError)
    message = refuse(same, disable="dead_code", error=ValueError)
    assert message == "disable='dead_code' is one word; allowed is a tuple of them: disable=('dead_code',)"


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), "1.0"])
def test_a_norm_to_clip_to_is_above_zero(norm):
    assert "must be a number above 0" in refuse(lambda m, x: x, error=ValueError, max_grad_norm=norm)


def test_layer_drop_is_told_how_to_be_turned_off(monkeypatch):
    monkeypatch.setattr(Inner, "layerdrop", 0.1, raising=False)

    def drop(self, x):
        return x if torch.rand(()) < self.layerdrop else -x

    assert "set layerdrop = 0 of layers.1" in refuse(drop)

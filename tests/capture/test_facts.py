"""What Python may ask of tensors, and set in torch, that a trace does not see as eager has it: refused, or watched."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.function(self, x)


def loss_fn(model, x):
    return model(x).square().mean()


def swap(model, x):
    y = model.linear(x)
    y.data = y.data * 2
    return y * y


def swap_batch(model, x):
    x.data = x.data * 2
    return model.linear(x)


def drop_gradient(model, x):
    model.linear.weight.grad = None
    return model.linear(x)


def double(model, x):
    torch.set_default_dtype(torch.float64)
    try:
        return model.linear(x) * torch.ones(4).float()
    finally:
        torch.set_default_dtype(torch.float32)


def strict(model, x):
    torch.use_deterministic_algorithms(True)
    return model.linear(x)


FACTS = {
    "asks for ._version of an input": lambda model, x: model.linear(x) * (1 + model.linear.weight._version),
    "asks for ._version of an": lambda model, x: model.linear(x) * (1 + x.detach()._version),
    "asks for ._base of an input": lambda model, x: model.linear(x) * (1.0 if x._base is None else 2.0),
    "asks for ._is_view of an input": lambda model, x: model.linear(x) * (1 + x._is_view()),
    "asks for .is_set_to of an input": lambda model, x: model.linear(x) * (1 + x.is_set_to(model.scale)),
    "asks for .storage_offset.. of the batch": lambda model, x: model.linear(x) * (1 + x[1:].storage_offset()),
    "uses .grad of a parameter": lambda model, x: model.linear(x) * (model.linear.weight.grad is None),
    "uses .grad of": drop_gradient,
    "assigns .data of a tensor": swap,
    "assigns .data of": swap_batch,
    "calls torch.set_default_dtype": double,
    "calls torch.use_deterministic_algorithms": strict,
}


@pytest.mark.parametrize("message", FACTS)
def test_facts_that_a_trace_does_not_have(message):
    with pytest.raises(CaptureError, match=rf"the model \(.*test_facts.py:\d+\) {message}") as caught:
        stepgraph.capture(Model(FACTS[message]), loss_fn, torch.randn(3, 4), passes="exact")
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() is torch.float32 and not torch.are_deterministic_algorithms_enabled()


def test_facts_of_what_the_step_makes(check_training):
    def forward(self, x):
        y = self.linear(x).add_(1)
        z = y[1:].as_strided((2, 4), (4, 1), y[1:].storage_offset())
        wanted = x.detach().requires_grad_()
        torch.use_deterministic_algorithms(False)  # as it is
        return z * (1 + y._version) * (1 + y[1:]._is_view()) * (wanted.grad is None) + y.data.mul_(2)[1:]

    batches = [{"x": torch.randn(3, 4)} for _ in range(3)]
    check_training(Model(forward), lambda model, batch: loss_fn(model, batch["x"]), batches)


def in_autocast(model, x):
    with torch.autocast("cpu"):
        return model.linear(x).float()


SETTINGS = {
    "autocast's dtype": (in_autocast, functools.partial(torch.set_autocast_dtype, "cpu"), torch.half, torch.bfloat16),
    "precision of products": (
        lambda model, x: model.linear(x) * (1 + (torch.get_float32_matmul_precision() == "high")),
        *(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "cuDNN": (
        lambda model, x: model.linear(x) * (1 + torch.backends.cudnn.deterministic),
        *(functools.partial(setattr, torch.backends.cudnn, "deterministic"), True, False),
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_torch_are_watched(setting):
    function, put, other, usual = SETTINGS[setting]
    model, x = Model(function), torch.randn(3, 4)
    try:
        put(usual)
        step = stepgraph.capture(model, loss_fn, x, passes="exact")
        for value in (usual, other):
            put(value)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                assert torch.equal(step(x), loss_fn(model, x))
            assert any("changed from" in str(one.message) for one in said) == (value is other)
    finally:
        put(usual)


def test_a_step_is_not_copied():
    model = Model(lambda model, x: model.linear(x))
    step = stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes=[])
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(CaptureError, match="cannot be copied or pickled: copy the model"):
            copied(step)

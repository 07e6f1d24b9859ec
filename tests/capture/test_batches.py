"""Batches: one tensor in two places, values that are equal and yet not the same, classes of transformers, layouts."""

import dataclasses
import math
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import CaptureError


class Encoding(UserDict):
    """As transformers' BatchEncoding: its keys are attributes too."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass
class Rows:
    x: torch.Tensor
    by: Any = 1.0
    n: int = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.x, self.n = self.x * 2, len(self.x)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    rows: Rows
    more: dict

    def scaled(self):
        return self.rows.x * self.rows.by * SETTINGS["scale"]


class Scaled(NamedTuple):
    rows: Rows

    @property
    def x(self):
        return self.rows.x * SETTINGS["scale"]


SETTINGS = {"scale": 1.0}


def by_fields(model, batch):
    return (model(batch.scaled()) * batch.more["y"]).sin().sum() / batch.rows.n


def by_identity(model, batch):
    return (model(batch["x"]) * (2.0 if batch["x"] is batch["y"] else 3.0)).sin().mean()


def by_sign(model, batch):
    return (model(batch["x"]) * math.copysign(1.0, batch["by"])).sin().mean()


def by_class(model, batch):
    return (model(batch.x) * (3.0 if isinstance(batch, Encoding) else 2.0)).sin().mean()


def by_dtype(model, batch):
    return (model(batch["x"]).to(batch["dtype"]) * batch["by"]).sin().mean().float()


def by_attribute(model, batch):
    return (model(batch["x"]) * getattr(batch["x"], "scale", 1.0)).sin().mean()


def scaled(scale):
    x = X.clone()
    x.scale = scale
    return {"x": x}


def written(model, batch):
    batch["x"].mul_(1.5)
    return (model(batch["x"]) * batch["y"]).sin().mean()


def by_product(model, batch):
    return (model(batch["x"]) * batch["y"]).sin().mean()


X = torch.linspace(-2, 2, 24).view(4, 6)


@pytest.mark.parametrize(
    "loss_fn, batches",
    [
        (by_identity, lambda: [(lambda x: {"x": x, "y": x})(X.clone()), {"x": X.clone(), "y": X.clone()}]),
        (written, lambda: [(lambda x: {"x": x, "y": x})(X.clone()), {"x": X.clone(), "y": X.clone()}]),
        (by_sign, lambda: [{"x": X, "by": 0.0}, {"x": X, "by": -0.0}]),
        (by_attribute, lambda: [{"x": X}, scaled(2.0)]),
        (by_attribute, lambda: [scaled(np.bool_(True)), scaled(3)]),
        (by_class, lambda: [Encoding(x=X), Encoding(x=X + 1)]),
        (by_fields, lambda: [Pair(Rows(X), {"y": X}), Pair(Rows(X + 1), {"y": X})]),
        (by_fields, lambda: [Pair(Rows(X, 2), {"y": X}), Pair(Rows(X, X), {"y": 2.0})]),
        (by_dtype, lambda: [{"x": X, "dtype": torch.float64, "by": 2}, {"x": X, "dtype": torch.bfloat16, "by": 2}]),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_python_sees_of_a_batch(loss_fn, batches, accumulate):
    model, (first, second) = nn.Linear(6, 6), batches()
    step = stepgraph.capture(model, loss_fn, first, passes="exact", accumulate=accumulate)
    for batch in (first, second, first):
        assert step.verify(batch).bitwise


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (lambda: Pair(Rows(X), {"y": X}), by_fields),
        (lambda: Scaled(Rows(X)), lambda model, batch: model(batch.x).sin().mean()),
    ],
)
def test_what_methods_of_a_batch_read(make, loss_fn, monkeypatch):
    step = stepgraph.capture(nn.Linear(6, 6), loss_fn, make(), passes="exact")
    monkeypatch.setitem(SETTINGS, "scale", 3.0)
    with pytest.warns(UserWarning, match="SETTINGS changed from .* captured again"):
        assert step.verify(make()).bitwise


def test_an_attribute_that_is_no_field_is_refused():
    rows = Rows(X)
    rows.extra = 1
    with pytest.raises(CaptureError, match="Rows with the attribute extra, which is no field of it"):
        stepgraph.capture(nn.Linear(6, 6), lambda m, b: m(b.x).mean(), rows)


def test_a_number_that_is_none_is_no_new_form():
    model = nn.Linear(6, 6)
    step = stepgraph.capture(model, lambda m, b: m(b["x"]).mean(), {"x": X, "by": float("nan")}, passes="exact")
    before = step.program
    step({"x": X, "by": float("nan")})
    assert step.program is before


@pytest.mark.parametrize(
    "odd, message",
    [
        (lambda: torch.eye(6).to_sparse(), "the batch holds a sparse tensor.*from their dense parts"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]]), "the batch holds a nested tensor.*pad rows"),
        (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "the batch holds a quantized tensor"),
        (lambda: X.numpy(), "the batch holds a value of type numpy.ndarray; allowed"),
        (lambda: scaled(X)["x"], "a tensor of the batch has the attribute scale, a torch.Tensor: pass it in the batch"),
    ],
)
def test_layouts_that_are_refused(odd, message):
    with pytest.raises(CaptureError, match=message) as caught:
        stepgraph.capture(nn.Linear(6, 6), lambda m, b: m(b["x"]).mean(), {"x": X, "odd": odd()}, passes="exact")
    assert "\n" not in str(caught.value)


def test_a_parameter_in_the_batch_is_refused():
    """At the capture, and in place of a plain tensor later."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def loss_fn(model, batch):
        return (model(batch["x"]) * batch["w"].sum()).square().mean()

    said = "the batch holds parameter weight of the model: take it from the model inside loss_fn"
    with pytest.raises(CaptureError, match=said):
        stepgraph.capture(model, loss_fn, {"x": x, "w": model.weight}, passes="exact")
    step = stepgraph.capture(model, loss_fn, {"x": x, "w": torch.randn(4, 4, requires_grad=True)}, passes="exact")
    with pytest.raises(CaptureError, match=said):
        step({"x": x, "w": model.weight})


@pytest.mark.parametrize("share", [lambda x: torch.from_numpy(x.numpy()), torch.from_dlpack])
def test_memory_that_is_shared_by_another_storage(share):
    """It may be read; a write would be seen in one tensor alone."""
    x = X.clone()
    together = {"x": x[:, 1:], "y": share(x)[:, :5]}
    step = stepgraph.capture(nn.Linear(5, 5), by_product, together, passes="exact")
    assert step.verify(together).bitwise
    step = stepgraph.capture(nn.Linear(6, 6), written, {"x": X.clone(), "y": X.clone()}, passes="exact")
    with pytest.raises(
        CaptureError, match=r"a tensor of the batch, whose memory a tensor of the batch, of shape \[4, 6\]"
    ):
        step({"x": x, "y": share(x)})

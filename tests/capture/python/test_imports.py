"""Modules that a trace is the first to import: what they register stays, whatever becomes of the capture."""

import sys

import pytest
import torch
from torch import nn

import stepgraph

REGISTRY = """
import importlib, os
KNOWN, TRIED = {}, set()
def register(name):
    return lambda function: KNOWN.setdefault(name, function)
def operator(name):
    if name not in TRIED:
        TRIED.add(name)
        importlib.import_module(f"PACKAGE.{name}")
    return KNOWN[name]
"""
DOUBLE = """
import os
from .registry import register
@register("double")
def double(x):
    return x * 2
"""


@pytest.fixture
def registry(tmp_path, monkeypatch, request):
    name = "with_registry_" + "".join(c for c in request.node.name if c.isalnum())
    (tmp_path / name).mkdir()
    for file, text in (("__init__", ""), ("registry", REGISTRY), ("double", DOUBLE)):
        (tmp_path / name / f"{file}.py").write_text(text.replace("PACKAGE", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__(f"{name}.registry").registry
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize("refused", [False, True])
def test_what_an_import_registers_stays(registry, refused):
    model, batch = nn.Linear(3, 3), torch.randn(2, 3)
    finders = list(sys.meta_path)

    def loss(model, batch):
        value = registry.operator("double")(model(batch)).square().mean()
        return value * 2 if refused and value > 3 else value

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if refused:
        with pytest.raises(stepgraph.errors.CaptureError, match="needs a tensor's value"):
            stepgraph.capture(model, loss, batch, optimizer, passes="exact")
        assert set() == registry.TRIED  # what the trace itself did is set back
    else:
        step = stepgraph.capture(model, loss, batch, optimizer, passes="exact")
        want = (model(batch) * 2).square().mean().detach()
        assert torch.equal(step(batch), want)
    assert list(registry.KNOWN) == ["double"]
    assert torch.isfinite(loss(model, batch))
    assert sys.meta_path == finders
    double = registry.KNOWN["double"]
    assert sys.modules[double.__module__].__loader__.get_source(double.__module__) == DOUBLE

"""What code of the user's own Python modules reads is watched, also where it is called as ``module.function()``."""

import gc
import importlib
import sys
import types
import weakref

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from stepgraph.capture.python.values import NotedModule

SOURCE = """
import random

SCALE, COUNT, LOG, GENERATOR = 1.0, 0, [], random.Random(3)

class Options:
    scale = 1.0

options = Options()

class Reads:
    def scale(self):
        return SCALE

def of_global():
    return SCALE

def of_object():
    return options.scale

def of_class():
    return Reads().scale()

def nested():
    return (lambda: of_global())()

def count():
    global COUNT
    COUNT += 1
    return COUNT

def log():
    LOG.append(1)
    return len(LOG)

def draw():
    return GENERATOR.random()

def __getattr__(name):
    if name == "computed":
        return SCALE
    raise AttributeError(name)
"""

#: Names a value of the first module that no code names which is met before.
LATE = """
from . import inner

def count():
    inner.COUNT += 1
    return inner.COUNT
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_of_a_test").mkdir()
    (tmp_path / "own_of_a_test" / "__init__.py").write_text("from . import inner, late\n")
    (tmp_path / "own_of_a_test" / "late.py").write_text(LATE)
    (tmp_path / "own_of_a_test" / "inner.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("own_of_a_test")
    yield package
    for name in ("own_of_a_test", "own_of_a_test.inner", "own_of_a_test.late"):
        del sys.modules[name]


def imported(own):
    import own_of_a_test.inner as inner

    return inner.of_global()


def imported_by_name(own):
    from own_of_a_test.inner import of_global

    return of_global()


READS = {
    "global": lambda own: own.inner.of_global(),
    "object": lambda own: own.inner.of_object(),
    "method": lambda own: own.inner.of_class(),
    "nested": lambda own: own.inner.nested(),
    "class": lambda own: own.inner.Options.scale,
    "by getattr": lambda own: getattr(own.inner, "of_global")(),  # noqa: B009
    "by a name that is made": lambda own: getattr(own.inner, "".join(["of", "_global"]))(),
    "value by a name that is made": lambda own: getattr(own.inner, "".join(["SCA", "LE"])),
    "imported": imported,
    "imported by name": imported_by_name,
    "computed": lambda own: own.inner.computed,
}


@pytest.mark.parametrize("kind", READS)
def test_what_functions_of_a_module_read(kind, own):
    read, x = READS[kind], torch.randn(3, 4)
    step = stepgraph.capture(nn.Linear(4, 4), lambda model, x: (model(x) * read(own)).mean(), x, passes="exact")
    own.inner.SCALE = own.inner.options.scale = own.inner.Options.scale = 2.0
    with pytest.warns(UserWarning, match=r"from 1\.0 to 2\.0|changed from None to 2\.0"):
        assert step.verify(x).bitwise


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own: own.inner.count(), r"own_of_a_test\.inner\.COUNT counts in Python"),
        (lambda own: own.inner.of_global() * own.late.count(), r"own_of_a_test\.inner\.COUNT counts in Python"),
        (lambda own: getattr(own.inner, "".join(["cou", "nt"]))(), r"own_of_a_test\.inner\.COUNT counts in Python"),
        (lambda own: own.inner.log(), r"forward sets own_of_a_test\.inner\.LOG from \[\] to \[1\]"),
        (lambda own: own.inner.draw(), r"inner\.py:\d+\) draws numbers from the generator"),
    ],
)
def test_what_functions_of_a_module_change(call, message, own):
    with pytest.raises(CaptureError, match=message):
        stepgraph.capture(nn.Linear(4, 4), lambda m, x: m(x).mean() * call(own), torch.randn(3, 4), passes="exact")
    assert type(own.inner) is type(own.late) is types.ModuleType


def test_what_an_optimizer_reads_by_a_name_that_is_made(own):
    class Scaled(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * getattr(own.inner, "".join(["SCA", "LE"])))

    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    loss_fn = lambda model, x: model(x).mean() * own.inner.of_object()  # noqa: E731
    step = stepgraph.capture(model, loss_fn, x, Scaled(model.parameters()), passes="exact")
    own.inner.SCALE = 2.0
    with pytest.warns(UserWarning, match=r"SCALE changed from 1\.0 to 2\.0"):
        assert step.verify(x).bitwise


def test_a_thread_reads_a_module_as_the_trace_of_another_ends(own):
    assert NotedModule.__getattribute__(own.inner, "SCALE") == 1.0


def test_a_model_that_nothing_holds_is_freed(own):
    def captured():
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
        stepgraph.capture(model, lambda model, x: model(x).mean() * own.inner.of_object(), x, passes="exact")(x)
        return weakref.ref(model)

    model = captured()
    for _ in range(3):  # cycles that lead through tensors take several
        gc.collect()
    assert model() is None

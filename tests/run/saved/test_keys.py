"""A step is found only where all that a capture reads is the same: each part in turn is changed, and told."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import re
import sys
import types

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.optimizer import Update
from stepgraph.parallel.layout import Layout
from stepgraph.passes import Target, resolve
from stepgraph.run.saved import key
from stepgraph.run.saved.reads.code import code_digest
from stepgraph.run.saved.reads.describe import Describer, Indescribable
from stepgraph.run.saved.start import Start
from stepgraph.run.saved.store import surroundings


class Block(nn.Module):
    """A layer with a plain option, a buffer, and a scale that its class has."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 4), 2
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return self.linear(x) * self.gain * self.scale + self.shift


class Case:
    """What a step is captured of."""

    def __init__(self):
        self.model = nn.Sequential(Block(), Block())
        self.factor = 1.0
        self.batch = {"x": torch.zeros(2, 4), "weight": 1.0}
        self.settings = {"lr": 0.1, "momentum": 0.9}
        self.options = {"max_grad_norm": 1.0, "accumulate": 1, "skip_nonfinite": False}
        self.passes, self.optimizer = "exact", torch.optim.SGD

    def parts(self):
        factor = self.factor

        def loss_fn(model, batch):
            return model(batch["x"]).sum() * factor

        update = Update(self.optimizer([p for p in self.model.parameters() if p.requires_grad], **self.settings))
        device = torch.device("cpu")
        passes = resolve(self.passes, (), Target.on(device))
        start = Start(self.model, loss_fn, self.batch, update, self.options, passes, device)
        return start.parts() | surroundings(start)


def other_forward(self, x):
    return self.linear(x)


CHANGES = {
    "a parameter's shape": ("model", lambda c: setattr(c.model[0], "linear", nn.Linear(4, 4, bias=False))),
    "a parameter's dtype": ("model", lambda c: c.model[0].double()),
    "a parameter's strides": ("model", lambda c: setattr(c.model[0].linear.weight, "data", torch.ones(4, 4).t())),
    "a frozen parameter": ("model", lambda c: c.model[0].linear.weight.requires_grad_(False)),
    "a tied parameter": ("model", lambda c: setattr(c.model[1].linear, "weight", c.model[0].linear.weight)),
    "shared memory": ("model", lambda c: setattr(c.model[1].shift, "data", c.model[0].shift)),
    "the training mode": ("model", lambda c: c.model[1].eval()),
    "an option": ("model", lambda c: setattr(c.model[0], "gain", 3)),
    "a module": ("model", lambda c: c.model.append(nn.Dropout(0.1))),
    "a hook": ("model", lambda c: c.model[0].register_forward_hook(lambda m, i, o: o * 2)),
    "a method of one module": ("model", lambda c: setattr(c.model[0], "forward", functools.partial(other_forward, c))),
    "a closure of the loss": ("loss", lambda c: setattr(c, "factor", 2.0)),
    "a batch's shape": ("batch", lambda c: c.batch.update(x=torch.zeros(3, 4))),
    "a batch's dtype": ("batch", lambda c: c.batch.update(x=torch.zeros(2, 4, dtype=torch.double))),
    "a batch's strides": ("batch", lambda c: c.batch.update(x=torch.zeros(4, 2).t())),
    "a batch that wants gradients": ("batch", lambda c: c.batch["x"].requires_grad_()),
    "a plain value of the batch": ("batch", lambda c: c.batch.update(weight=2.0)),
    "a key of the batch": ("batch", lambda c: c.batch.update(y=torch.zeros(2))),
    "the kind of optimizer": ("optimizer", lambda c: vars(c).update(optimizer=torch.optim.AdamW, settings={"lr": 0.1})),
    "momentum": ("optimizer", lambda c: c.settings.update(momentum=0.8)),
    "a rate that is a tensor": ("optimizer", lambda c: c.settings.update(lr=torch.tensor(0.1), fused=True)),
    "clipping": ("options", lambda c: c.options.update(max_grad_norm=2.0)),
    "accumulation": ("options", lambda c: c.options.update(accumulate=2)),
    "the guard": ("options", lambda c: c.options.update(skip_nonfinite=True)),
    "passes": ("passes", lambda c: setattr(c, "passes", ["dead_code"])),
    "a pass's options": ("passes", lambda c: setattr(c, "passes", stepgraph.StepOptions("exact", memory="full"))),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_captured_is_a_miss(change):
    torch.manual_seed(0)
    part, apply = CHANGES[change]
    case = Case()
    before = case.parts()
    assert key.difference(before, case.parts()) == []
    apply(case)
    assert part in [found.partition(" ")[0] for found in key.difference(before, case.parts())]


def test_hashes_are_not_told():
    one, other = "0f" * 32, "1e" * 32
    saved = {"graph": one, "optimizer": {"state": one, "lr": 1, "eps": None}, "loss": "a"}
    now = {"graph": other, "optimizer": {"state": other, "lr": 1, "eps": one}, "loss": "b"}
    assert key.difference(saved, now) == [
        "graph",
        f"optimizer (state; eps was nothing, is {one[:57]}...)",
        "loss (a, now b)",
    ]


def test_values_of_parameters_and_the_rate_are_no_part():
    case = Case()
    before = case.parts()
    for tensor in case.model.state_dict().values():
        tensor.add_(1.0)
    case.settings["lr"] = 0.2
    assert key.difference(before, case.parts()) == []


@contextlib.contextmanager
def set_to(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def every_module_hooked():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def slow_linear(x, weight, bias=None):
    return x @ weight.t()


AROUND = {
    "determinism": ("settings", lambda: set_to(torch.use_deterministic_algorithms, True, False)),
    "matmul precision": ("settings", lambda: set_to(torch.set_float32_matmul_precision, "high", "highest")),
    "tf32 of convolutions": ("settings", lambda: patched(torch.backends.cudnn, "allow_tf32", False)),
    "the default dtype": ("settings", lambda: set_to(torch.set_default_dtype, torch.double, torch.float)),
    "the default device": ("settings", lambda: set_to(torch.set_default_device, "meta", None)),
    "autocast's dtype": ("settings", lambda: torch_autocast_dtype(torch.float16)),
    "attention kernels": ("settings", lambda: set_to(torch.backends.cuda.enable_flash_sdp, False, True)),
    "threads": ("device", lambda: set_to(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads())),
    "torch's version": ("versions", lambda: patched(torch, "__version__", "2.99.0")),
    "hooks of every module": ("hooks", every_module_hooked),
    "a function of torch that was replaced": ("patches", lambda: patched(nn.functional, "linear", slow_linear)),
    "a method of torch that was replaced": ("patches", lambda: patched(nn.Linear, "forward", other_forward)),
    "a method of a class": ("model", lambda: patched(Block, "forward", other_forward)),
    "a value of a class": ("model", lambda: patched(Block, "scale", 2.0)),
}


def torch_autocast_dtype(dtype):
    return set_to(functools.partial(torch.set_autocast_dtype, "cpu"), dtype, torch.get_autocast_dtype("cpu"))


@pytest.mark.parametrize("change", AROUND)
def test_a_change_of_what_is_around_is_a_miss(change):
    part, around = AROUND[change]
    torch.set_float32_matmul_precision("highest")  # the same as before it was ever set, under another name
    case = Case()
    before = case.parts()
    with around():
        assert part in [found.partition(" ")[0] for found in key.difference(before, case.parts())]
    assert key.difference(before, case.parts()) == []


def test_options_of_transformers_are_described_alike_in_every_process():
    """transformers keeps the hash of a string in them."""
    options = pytest.importorskip("transformers").GenerationConfig(max_length=7)
    text = Describer()(options, "options")
    options._original_object_hash = 1
    assert Describer()(options, "options") == text
    options.max_length = 8
    assert Describer()(options, "options") != text


def test_sets_of_constants_have_one_text():
    """``x in {"a", "b"}`` holds a set, whose order is another in every process."""

    def function(x):
        return x in {"a", "b"}

    def text(*items):
        return code_digest(function.__code__.replace(co_consts=(None, frozenset(items), (frozenset(items), 1))))

    orders = (0, 8), (8, 0)
    assert list(frozenset(orders[0])) != list(frozenset(orders[1]))
    assert text(*orders[0]) == text(*orders[1]) != text(0, 16)
    assert code_digest(function.__code__) != text()


def test_patterns_are_described():
    texts = [Describer()(re.compile(*given), "a pattern") for given in (("a+",), ("a+", re.I), ("b+",), ("a" * 300,))]
    assert len(set(texts)) == 4 and Describer()(re.compile("a+"), "a pattern") == texts[0]
    assert Describer()(re.compile("a" * 300 + "b"), "a pattern") != texts[3]


def test_what_a_layout_keeps_of_what_it_computed_is_no_part():
    """A process that gave a model its weights has asked it for more than one that only captures."""
    axes = types.SimpleNamespace(sizes={"dp_shard": 2}, shard="dp_shard")
    layout = Layout(torch.Size([5, 4]), axes, (("dp_shard", 0),), torch.float32, torch.float32)
    text = Describer()(layout, "layout")
    assert layout.local_shape == (3, 4) and "local_shape" in vars(layout)
    assert Describer()(layout, "layout") == text
    assert Describer()(dataclasses.replace(layout, splits=(("dp_shard", 1),)), "layout") != text


def test_modes_around_a_capture_have_no_text():
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    case = Case()
    for mode in (Doubling(), torch.autocast("cpu", torch.bfloat16)):
        with mode, pytest.raises(Indescribable, match="the mode around the capture"):
            case.parts()


SOURCE = """
import os
import torch

FACTOR = 2.0
TABLE = {"bias": 0.5}

def scaled(x):
    return x * FACTOR + TABLE["bias"] + float(os.environ.get("OF_THE_TEST", "0"))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return scaled(self.linear(x))

def loss_fn(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user's own module, and what captures its model."""
    (tmp_path / "of_the_user.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_the_user")
    yield module, lambda: _captured(module, tmp_path / "steps")
    del sys.modules["of_the_user"]


def _captured(module, folder):
    torch.manual_seed(0)
    model = module.Model()
    step = stepgraph.capture(model, module.loss_fn, torch.ones(2, 3), torch.optim.SGD(model.parameters(), lr=0.1),
                             passes="exact", saved=folder)  # fmt: skip
    reference = module.loss_fn(copy.deepcopy(model), torch.ones(2, 3)).detach()
    assert torch.equal(step(torch.ones(2, 3)), reference)
    return step.saved


def _changed_file(module, monkeypatch):
    path = module.__file__
    with open(path, "a") as file:
        file.write("\n# another line\n")


USER_CHANGES = {
    "the global of_the_user.FACTOR": lambda module, monkeypatch: setattr(module, "FACTOR", 3.0),
    "the global of_the_user.TABLE": lambda module, monkeypatch: module.TABLE.update(bias=1.0),
    "the global of_the_user.scaled": lambda module, monkeypatch: setattr(module, "scaled", torch.tanh),
    "the environment variable OF_THE_TEST": lambda module, monkeypatch: monkeypatch.setenv("OF_THE_TEST", "1"),
    "the source file": _changed_file,
}


@pytest.mark.parametrize("what", USER_CHANGES)
def test_a_change_of_what_a_trace_went_through_is_a_miss(what, user, monkeypatch):
    module, start = user
    assert start().loaded is None and start().loaded == "start"
    USER_CHANGES[what](module, monkeypatch)
    outcome = start()  # compares the step with eager
    assert outcome.loaded != "start"
    assert what in outcome.notes[0] and "changed since the saved start" in outcome.notes[0]
    assert start().loaded == "start"

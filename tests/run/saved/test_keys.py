"""A step is found only where the traced graphs and everything below them are the same: each part in turn is changed."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.inductor.packed import NotSavable
from stepgraph.passes import PASSES, Target, resolve
from stepgraph.passes.contract import register
from stepgraph.run.saved import key
from stepgraph.run.saved.folder import Folder
from stepgraph.run.saved.store import Rewriting, _Saving


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
    """What a step is captured from."""

    def __init__(self):
        self.model = nn.Sequential(Block(), Block())
        self.factor, self.table = 1.0, torch.tensor([1.0, 2.0])
        self.batch = {"x": torch.zeros(2, 4), "weight": 1.0}
        self.settings = {"lr": 0.1, "momentum": 0.9}
        self.options = {"max_grad_norm": 1.0, "accumulate": 1, "skip_nonfinite": False}
        self.passes, self.optimizer = "exact", torch.optim.SGD

    def parts(self):
        def loss_fn(model, batch):
            return (model(batch["x"]).sum() * self.factor * batch["weight"] * self.table).sum()

        optimizer = self.optimizer([p for p in self.model.parameters() if p.requires_grad], **self.settings)
        traced = trace_step(self.model, loss_fn, self.batch, optimizer, **self.options)
        device = torch.device("cpu")
        rewriting = Rewriting(None, resolve(self.passes, (), Target.on(device)), device, None)
        return _Saving(Folder("unused", given=True), traced, rewriting).parts


def other_forward(self, x):
    return self.linear(x)


CHANGES = {
    "a parameter's shape": ("graph", lambda c: setattr(c.model[0], "linear", nn.Linear(4, 4, bias=False))),
    "a parameter's dtype": ("graph", lambda c: (c.model.double(), c.batch.update(x=torch.zeros(2, 4).double()))),
    "a parameter's strides": ("graph", lambda c: setattr(c.model[0].linear.weight, "data", torch.ones(4, 4).t())),
    "a frozen parameter": ("graph", lambda c: c.model[0].linear.weight.requires_grad_(False)),
    "a tied parameter": ("graph", lambda c: setattr(c.model[1].linear, "weight", c.model[0].linear.weight)),
    "an option": ("graph", lambda c: setattr(c.model[0], "gain", 3)),
    "a module": ("graph", lambda c: c.model.append(nn.Dropout(0.1))),
    "a hook": ("graph", lambda c: c.model[0].register_forward_hook(lambda m, i, o: o * 2)),
    "a method of one module": ("graph", lambda c: setattr(c.model[0], "forward", lambda x: c.model[0].linear(x))),
    "a closure of the loss": ("graph", lambda c: setattr(c, "factor", 2.0)),
    "a constant's value": ("graph", lambda c: setattr(c, "table", torch.tensor([1.0, 3.0]))),
    "a batch's shape": ("graph", lambda c: c.batch.update(x=torch.zeros(3, 4))),
    "a batch's strides": ("graph", lambda c: c.batch.update(x=torch.zeros(4, 2).t())),
    "a plain value of the batch": ("graph", lambda c: c.batch.update(weight=2.0)),
    "the kind of optimizer": ("graph", lambda c: vars(c).update(optimizer=torch.optim.AdamW, settings={"lr": 0.1})),
    "momentum": ("graph", lambda c: c.settings.update(momentum=0.8)),
    "clipping": ("graph", lambda c: c.options.update(max_grad_norm=2.0)),
    "accumulation": ("graph", lambda c: c.options.update(accumulate=2)),
    "the guard": ("graph", lambda c: c.options.update(skip_nonfinite=True)),
    "passes": ("passes", lambda c: setattr(c, "passes", ["dead_code"])),
    "a pass's options": ("passes", lambda c: setattr(c, "passes", stepgraph.StepOptions("exact", memory="full"))),
}  # fmt: skip


def parts_that_differ(before, now):
    return [found.partition(" ")[0] for found in key.differing(before, now)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_step_is_a_miss(change):
    torch.manual_seed(0)
    part, apply = CHANGES[change]
    case = Case()
    before = case.parts()
    assert key.differing(before, case.parts()) == []
    apply(case)
    assert part in parts_that_differ(before, case.parts())


def test_values_of_parameters_and_the_rate_are_no_part():
    case = Case()
    before = case.parts()
    for tensor in case.model.state_dict().values():
        tensor.add_(1.0)
    case.settings["lr"] = 0.2
    assert key.differing(before, case.parts()) == []


def test_a_miss_names_the_parts_that_differ():
    saved = {"graph": "a", "versions": {"torch": "1", "triton": "1", "python": "1"}, "pipeline": {}}
    now = {"graph": "b", "versions": {"torch": "2", "triton": "1", "python": "2"}, "pipeline": {}}
    assert key.differing(saved, now) == ["graph", "versions (torch, python)"]


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


def slow_linear(x, weight, bias=None):
    return x @ weight.t()


def doubled_linear(self, x):
    return nn.functional.linear(x, self.weight, self.bias) * 2


def convolutions_take_tf32(value):
    torch.backends.cudnn.allow_tf32 = value


INDUCTOR = "torch._inductor.config.epilogue_fusion"
AROUND = {
    "determinism": ("settings", lambda: set_to(torch.use_deterministic_algorithms, True, False)),
    "matmul precision": ("settings", lambda: set_to(torch.set_float32_matmul_precision, "high", "highest")),
    "tf32 of convolutions": ("settings", lambda: set_to(convolutions_take_tf32, False, True)),
    "the default dtype": ("settings", lambda: set_to(torch.set_default_dtype, torch.double, torch.float)),
    "autocast's dtype": ("settings", lambda: torch_autocast_dtype(torch.float16)),
    "attention kernels": ("settings", lambda: set_to(torch.backends.cuda.enable_flash_sdp, False, True)),
    "Inductor's configuration": ("settings", lambda: mock.patch(INDUCTOR, False)),
    "a variable of Inductor": ("settings", lambda: mock.patch.dict("os.environ", {"TORCHINDUCTOR_OF_THE_TEST": "1"})),
    "threads": ("device", lambda: set_to(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads())),
    "torch's version": ("versions", lambda: mock.patch.object(torch, "__version__", "2.99.0")),
    "stepgraph's sources": ("versions", lambda: mock.patch.object(key, "own_sources", lambda: "others")),
    "hooks of every module": ("graph", every_module_hooked),
    "a function of torch that was replaced": ("graph", lambda: mock.patch.object(nn.functional, "linear", slow_linear)),
    "a method of torch that was replaced": ("graph", lambda: mock.patch.object(nn.Linear, "forward", doubled_linear)),
    "a method of a class": ("graph", lambda: mock.patch.object(Block, "forward", other_forward)),
    "a value of a class": ("graph", lambda: mock.patch.object(Block, "scale", 2.0)),
}


def torch_autocast_dtype(dtype):
    return set_to(functools.partial(torch.set_autocast_dtype, "cpu"), dtype, torch.get_autocast_dtype("cpu"))


@pytest.mark.parametrize("change", AROUND)
def test_a_change_of_what_is_around_is_a_miss(change):
    part, around = AROUND[change]
    torch.set_float32_matmul_precision("highest")  # the same as before it was ever set, under another name
    case = Case()
    case.passes = ["dead_code", "inductor"]
    before = case.parts()
    with around():
        assert part in parts_that_differ(before, case.parts())
    assert key.differing(before, case.parts()) == []


def test_where_files_lie_is_no_part(monkeypatch):
    case = Case()
    case.passes = ["inductor"]
    before = case.parts()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/another")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/another")
    assert key.differing(before, case.parts()) == []


def test_a_pass_from_outside_is_not_saved(tmp_path, monkeypatch):
    """What it reads besides the graph is unknown."""
    monkeypatch.setitem(PASSES, "of_the_test", None)

    @register("of_the_test", "exact")
    def of_the_test(step, options, report):
        """Changes nothing."""

    model = nn.Linear(3, 3)
    for _ in range(2):
        step = stepgraph.capture(
            model, lambda m, x: m(x).sum(), torch.ones(2, 3), passes=["of_the_test"], saved=tmp_path
        )
        assert not step.saved.loaded and step.saved.kept is None and "of_the_test" in step.saved.notes[0]


def test_every_pass_of_ours_has_a_key():
    """One that had none would leave every step that it is part of unsaved."""
    assert key.pass_facts(list(PASSES.values())).keys() == {"order", *PASSES}


def test_an_option_without_a_text_of_its_own_is_refused():
    memory = PASSES["overlap_experts"].with_options(memory=torch.tensor(0.1))
    with pytest.raises(NotSavable, match=r"overlap_experts.memory"):
        key.pass_facts([memory])


def test_an_operator_whose_kernels_inductor_compiles_is_not_saved(tmp_path):
    """The graph names a ``triton_op``, and compiled pieces hold the code of its kernels."""

    @torch.library.triton_op("of_the_test::double", mutates_args={})
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kernels = mock.patch.dict("torch._library.triton.triton_ops_to_kernels", {"of_the_test::double": [object()]})
    with kernels:
        step = stepgraph.capture(
            nn.Linear(3, 3), lambda m, x: m(double(x)).sum(), torch.ones(2, 3), passes="exact", saved=tmp_path
        )
    assert step.saved.kept is None and "of_the_test.double" in step.saved.notes[0]

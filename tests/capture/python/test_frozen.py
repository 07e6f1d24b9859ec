"""What Python decides in a step is seen: drawn on the host, counted in forward, or changed since the capture."""

import array
import contextvars
import copy
import ctypes
import enum
import inspect
import os
import random
import re
import secrets
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph import CaptureError
from stepgraph.lower import lowering


def loss_fn(model, x):
    return model(x).square().mean()


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.numpy_generator, self.generator = np.random.default_rng(3), random.Random(3)
        self.count, self.scale, self.flag, self.length, self.mode = 3, 1.5, False, None, "first"

    def forward(self, x):
        return self.function(self, self.linear(x))


def build(function):
    return nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"inner": Inner(function)})["inner"])


@pytest.fixture
def traces(monkeypatch):
    """How often a step was traced, as the length of a list."""
    calls, trace_step = [], lowering.trace_step
    monkeypatch.setattr(lowering, "trace_step", lambda *a, **k: calls.append(1) or trace_step(*a, **k))
    return calls


# ---- random numbers of the host ----


def numpy_branch(self, x):
    return x if np.random.uniform() < 0.5 else -x


def python_branch(self, x):
    return x if random.random() < 0.5 else -x


def python_integer(self, x):
    return x.roll(random.randint(1, 5), 1)


def own_generator(self, x):
    return x * float(self.numpy_generator.normal())


def own_python_generator(self, x):
    return x * self.generator.gauss(0, 1)


def system_bytes(self, x):
    return x * os.urandom(1)[0]


def system_generator(self, x):
    return x * random.SystemRandom().random()


def system_secret(self, x):
    return x * secrets.randbelow(1 << 30)


def generator_without_a_seed(self, x):
    return x * np.random.default_rng().random()


def host_state():
    return random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("function", "generator"),
    [
        (numpy_branch, r"numpy\.random"),
        (python_branch, "Python's random"),
        (python_integer, "Python's random"),
        (own_generator, r"the generator 1\.numpy_generator"),
        (own_python_generator, r"the generator 1\.generator"),
        (system_bytes, "the system's entropy"),
        (system_generator, "the system's entropy"),
        (system_secret, "the system's entropy"),
        (generator_without_a_seed, "the system's entropy"),
    ],
)
def test_random_numbers_of_the_host_are_refused_at_their_line(function, generator, accumulate):
    model = build(function)
    optimizer = torch.optim.AdamW(model.parameters())
    before, held = host_state(), copy.deepcopy(model[1].numpy_generator.bit_generator.state)
    message = rf"1 \((.+):(\d+)\) draws numbers from {generator}, .*pass them in the batch"
    with pytest.raises(CaptureError, match=message) as caught:
        stepgraph.capture(model, loss_fn, torch.randn(4, 6), optimizer, passes="exact", accumulate=accumulate)
    file, line = re.match(message, str(caught.value)).groups()
    assert file == __file__ and int(line) == inspect.getsourcelines(function)[1] + 1
    assert "\n" not in str(caught.value)
    assert host_state() == before and model[1].numpy_generator.bit_generator.state == held
    assert not optimizer.state


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, draw):
        ctx.draw = draw
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.draw(), None


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: os.urandom(1)[0]])
def test_a_draw_in_backward(draw):
    before = host_state()
    with pytest.raises(CaptureError, match=r"backward draws numbers from .*, which would be the same in every step"):
        stepgraph.capture(nn.Linear(6, 6), lambda m, x: Noisy.apply(m(x), draw).mean(), torch.randn(4, 6))
    assert host_state() == before


def test_a_draw_in_the_loss_has_no_module():
    def noisy(model, x):
        return loss_fn(model, x) * np.random.rand()

    with pytest.raises(CaptureError, match=r"the model \(.*test_frozen.py:\d+\) draws numbers from numpy"):
        stepgraph.capture(nn.Linear(6, 6), noisy, torch.randn(4, 6), passes="exact")


def test_whisper_masks_its_spectrum_by_numpy():
    """`apply_spec_augment` draws its masks with NumPy."""
    transformers = pytest.importorskip("transformers", minversion="5.20")  # earlier: LayerDrop draws at any rate
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=8,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20, pad_token_id=0,
        max_target_positions=16, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, apply_spec_augment=True,
        mask_time_prob=0.5, mask_time_length=2, init_std=0.5,  # at 0.02 two masks may give one loss, to the last bit
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).train()
    batch = {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 50, (2, 7))}
    step = stepgraph.capture(model, lambda m, b: m(**b).loss, batch, passes="exact")
    assert [step.verify(batch).bitwise for _ in range(2)] == [True, True]
    assert step(batch) != step(batch)


def test_torch_draws_anew_in_every_step_and_drawing_outside_is_free():
    model, x = build(lambda self, x: F.dropout(x, 0.5)), torch.randn(4, 6)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    random.random(), np.random.rand()
    assert not torch.equal(step(x), step(x))


# ---- attributes that forward changes ----


def counts_and_scales(self, x):
    self.count += 1
    return x * self.count


def counts_in_a_constant(self, x):
    self.count += 1
    return x + torch.tensor(float(self.count))


def anneals(self, x):
    self.scale *= 0.9
    return x * self.scale


def first_time(self, x):
    if not self.flag:
        self.flag = True
        return x * 2
    return x


def second_mode(self, x):
    mode, self.mode = self.mode, "second"
    return x.relu() if mode == "first" else x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (counts_and_scales, r"1\.count counts in Python: 3 -> 4; it would be frozen; register it as a buffer"),
        (counts_in_a_constant, r"1\.count counts in Python: 3 -> 4"),
        (anneals, r"1\.scale counts in Python: 1\.5 -> 1\.35"),
        (first_time, r"forward sets 1\.flag from False to True in Python and its next call differs"),
        (second_mode, r"forward sets 1\.mode from 'first' to 'second'"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_forward_counts_is_refused_where_it_matters(function, message, accumulate):
    model = build(function)
    optimizer = torch.optim.AdamW(model.parameters())
    before = dict(vars(model[1]))
    with pytest.raises(CaptureError, match=message) as caught:
        stepgraph.capture(model, loss_fn, torch.randn(4, 6), optimizer, passes="exact", accumulate=accumulate)
    assert "\n" not in str(caught.value)
    assert vars(model[1]) == before and not optimizer.state


VARIABLE, UNSET = contextvars.ContextVar("count", default=1), contextvars.ContextVar("unset")
ITEMS = {"numpy": np.ones(1), "bytes": bytearray(b"\x01"), "array": array.array("d", [1.0])}
ITEMS |= {"view": memoryview(bytearray(b"\x01")), "c array": (ctypes.c_int * 1)(1)}
NUMBER = ctypes.c_int(1)
OUTSIDE = types.ModuleType("outside")


class Slotted:
    __slots__ = ("count",)


class Choice(enum.Enum):
    FIRST = 1


class Number(int):
    pass


class Plain:
    pass


OBJECTS = {"slot": Slotted(), "number": Number(3), "enum": Choice.FIRST, "class": Plain, "namespace": OUTSIDE}
OBJECTS["function"] = lambda: None


def in_a_variable(model):
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def in_a_variable_without_a_value(model):
    UNSET.set(UNSET.get(0) + 1)
    return UNSET.get()


def in_the_environment(model):
    os.environ["COUNT_OF_CALLS"] = str(1 + int(os.environ.get("COUNT_OF_CALLS", "0")))
    return int(os.environ["COUNT_OF_CALLS"])


def in_a_new_global(model):
    globals()["COUNT"] = globals().get("COUNT", 0) + 1
    return globals()["COUNT"]


def in_a_number_of_c(model):
    NUMBER.value += 1
    return NUMBER.value


def in_an_item(name):
    held = ITEMS[name]

    def count(model):
        held[0] += 1
        return float(held[0])

    return count


def in_an_attribute(name):
    def count(model):
        held = model[0] if name == "module" else OBJECTS[name]
        held.count = getattr(held, "count", 0) + 1
        return held.count

    return count


COUNTS = {
    function.__name__: function
    for function in (
        in_a_variable, in_a_variable_without_a_value, in_the_environment, in_a_new_global, in_a_number_of_c
    )
} | {name: in_an_item(name) for name in ITEMS}  # fmt: skip
COUNTS |= {f"attribute of {name}": in_an_attribute(name) for name in ("module", *OBJECTS)}


@pytest.mark.parametrize("matters", [True, False])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_count_wherever_it_is_kept_is_refused(count, matters, monkeypatch):
    """Both if the count changes the step and if it is only kept; kept in an attribute of the model it gives a warning.
    The capture leaves the count as it was."""
    monkeypatch.delenv("COUNT_OF_CALLS", raising=False)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    before = count(model)

    def loss(model, x):
        n = count(model)
        return loss_fn(model, x) * (n if matters else 1)

    told = count is COUNTS["attribute of module"] and not matters
    with (
        pytest.warns(UserWarning, match="counts in Python, and a captured step leaves it at 1")
        if told
        else pytest.raises(CaptureError, match=r"counts in Python: |forward sets |the loss sets ")
    ):
        stepgraph.capture(model, loss, torch.randn(2, 6))
    assert count(model) == before + 1


class Settings:
    __slots__ = ("label", "scale")

    def __init__(self):
        self.scale, self.label = 2.0, "first"


def test_a_slot_that_no_step_reads_may_change(traces):
    settings = Settings()
    step = stepgraph.capture(build(lambda self, x: x * settings.scale), loss_fn, torch.randn(2, 6), passes="exact")
    settings.label = "second"
    first = step(torch.ones(2, 6))
    assert len(traces) == 1
    settings.scale = 3.0
    with pytest.warns(UserWarning, match=r"settings\.scale changed from 2\.0 to 3\.0: the step is captured again"):
        assert step(torch.ones(2, 6)) != first


def keeps_a_length(self, x):
    if self.length is None:
        self.length = x.shape[0]
    return x * self.length


def test_what_settles_is_captured():
    model, x = build(keeps_a_length), torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = stepgraph.capture(model, loss_fn, x, torch.optim.AdamW(model.parameters()), passes="exact")
    assert model[1].length is None and step.verify(x).bitwise


def test_a_counter_that_changes_nothing_yet_is_told():
    def later(self, x):
        self.count += 1
        return x * 2 if self.count > 100 else x

    model, x = build(later), torch.randn(4, 6)
    with pytest.warns(UserWarning, match=r"1\.count counts in Python, and a captured step leaves it at 3; if a later"):
        step = stepgraph.capture(model, loss_fn, x, passes="exact")
    assert step.verify(x).bitwise and model[1].count == 3


def test_a_count_in_a_buffer_is_right():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.linear(x) * self.count

    model, x = Counts(), torch.randn(4, 6)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    step(x)
    assert step.verify(x).bitwise and model.count == 1


# ---- what the user changes after the capture ----


class Options:
    def __init__(self):
        self.scale = 2.0


class Reads(nn.Module):
    """Reads what modules have in Python: attributes of its own, of its class and of a configuration, and functions."""

    constant = 2.0

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)
        self.act, self.activation = nn.ReLU(), F.relu
        self.scale, self.unread, self.config = 1.5, 0, Options()
        self.norm, self.by_name, self.listed = nn.LayerNorm(6), {"one": 1.0, "two": 2.0}, [1.0]

    def forward(self, x):
        x = self.activation(self.dropout(self.act(self.first(x))) * self.scale) * self.constant
        x = x * self.by_name["two"] * self.listed[0]
        return self.norm(self.last(x)) * self.config.scale


CHANGES = {
    "dropout": (lambda m: setattr(m.dropout, "p", 0.25), r"dropout\.p changed from 0\.5 to 0\.25"),
    "number": (lambda m: setattr(m, "scale", 3.0), r"scale changed from 1\.5 to 3\.0"),
    "type": (lambda m: setattr(m, "scale", True), r"scale changed from 1\.5 to True"),
    "epsilon": (lambda m: setattr(m.norm, "eps", 0.1), r"norm\.eps changed from 1e-05 to 0\.1"),
    "over the class": (lambda m: setattr(m, "constant", 5.0), r"constant changed from None to 5\.0"),
    "configuration": (lambda m: setattr(m.config, "scale", 5.0), r"config\.scale changed from 2\.0 to 5\.0"),
    "item": (lambda m: m.by_name.update(two=3.0), r"by_name changed from \{.*2\.0\} to \{.*3\.0\}"),
    "element": (lambda m: m.listed.append(2.0), r"listed changed from \[1\.0\] to \[1\.0, 2\.0\]"),
    "tuple": (lambda m: setattr(m.norm, "normalized_shape", [6]), r"normalized_shape changed from \(6,\) to \[6\]"),
    "order": (lambda m: m.add_module("act", m._modules.pop("act")), "submodules were replaced"),
    "order of parameters": (lambda m: m.norm.register_parameter("weight", m.norm._parameters.pop("weight")), "of norm"),
    "function": (lambda m: setattr(m, "activation", F.gelu), r"activation changed from relu to gelu"),
    "submodule": (lambda m: setattr(m, "act", nn.GELU()), "submodules were replaced"),
    "forward": (lambda m: setattr(m.act, "forward", F.gelu), r"act\.forward changed from None to gelu"),
    "hook": (lambda m: m.act.register_forward_hook(lambda m, a, y: y * 3), "hooks of act were added"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)), "hooks of the model were added"),
    "backward": (lambda m: m.act.register_full_backward_hook(lambda m, i, o: (i[0] * 3,)), "hooks of act were added"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_since_the_capture_is_taken(kind, traces):
    change, message = CHANGES[kind]
    model, x = Reads(), torch.randn(4, 6)
    step = stepgraph.capture(model, loss_fn, x, torch.optim.AdamW(model.parameters()), passes="exact")
    step(x)
    change(model)
    with pytest.warns(UserWarning, match=f"{message}.*: the step is captured again"):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
        assert step.verify(x).bitwise
    assert len(traces) == 2


def test_a_hook_that_is_removed_and_one_of_every_module(traces):
    model, x = Reads(), torch.randn(4, 6)
    handle = model.act.register_forward_hook(lambda m, a, y: y * 3)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    handle.remove()
    with pytest.warns(UserWarning, match=r"act\._forward_hooks\[0\] was deleted"):
        assert step.verify(x).bitwise
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 1.5)
    try:
        with pytest.warns(UserWarning, match="hooks of every module were added"):
            assert step.verify(x).bitwise
    finally:
        everywhere.remove()
    assert len(traces) == 3


def test_a_hook_that_is_registered_again(traces):
    """As transformers does around generation: an equal hook costs nothing, another one a capture."""
    model, x = Reads(), torch.randn(4, 6)

    def register(factor, **options):
        return model.act.register_forward_hook(lambda *given: given[-1] * factor, **options)

    handle = register(3)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for options, expected in (({}, 1), ({"with_kwargs": True}, 2)):
        handle.remove()
        handle = register(3, **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert step.verify(x).bitwise
        assert len(traces) == 1 + len(said) == expected
    handle.remove()
    register(4, with_kwargs=True)
    with pytest.warns(UserWarning, match="changed from 3 to 4"):
        assert step.verify(x).bitwise


def register_node_hook(weight, hook, register="register_hook"):
    node = torch.autograd.graph.get_gradient_edge(weight).node  # lives as long as it is held
    return node, getattr(node, register)(hook)


def register_node_prehook(weight, hook):
    return register_node_hook(weight, hook, "register_prehook")


HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    register_node_hook,
    register_node_prehook,
)


@pytest.mark.parametrize("register", HOOKS)
def test_a_gradient_hook_since_the_capture_is_refused(register):
    model, x = Reads(), torch.randn(4, 6)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    held = register(model.last.weight, lambda *_: None)
    with (
        pytest.warns(UserWarning, match=r"a gradient hook of parameter last\.weight was added"),
        pytest.raises(CaptureError, match=r"parameter last\.weight has a gradient hook"),
    ):
        step(x)
    del held


def test_changes_that_do_not_concern_the_step_cost_nothing(traces):
    """Attributes that forward does not read, equal values in other objects, and hooks of other modules."""
    model, other, x = Reads(), nn.Linear(2, 2), torch.randn(4, 6)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            model.unread, model.late, model.scale = i, i, float("1.5")
            other.register_forward_hook(lambda *_: None)
            step(x)
    assert len(traces) == 1


def test_capture_leaves_the_class_of_modules_alone():
    before = dict(vars(nn.Module))
    with pytest.raises(ZeroDivisionError):
        stepgraph.capture(Reads(), lambda m, x: loss_fn(m, x) / (1 // 0), torch.randn(4, 6), passes="exact")
    stepgraph.capture(Reads(), loss_fn, torch.randn(4, 6), passes="exact")
    assert dict(vars(nn.Module)) == before


class Weight(nn.Parameter):
    pass


class Scaler(torch.amp.GradScaler):
    pass


def test_capture_leaves_the_bases_of_classes_that_code_names_alone():
    model = nn.Linear(6, 6)
    model.weight = Weight(model.weight.detach())
    bases = torch.Tensor, nn.Parameter, torch.amp.GradScaler
    before = [dict(vars(base)) for base in bases]

    def loss(m, x):
        return loss_fn(m, x) * (2 if isinstance(m.weight, Weight) and not isinstance(x, Scaler) else 1)

    step = stepgraph.capture(model, loss, x := torch.randn(4, 6), passes="exact")
    assert [dict(vars(base)) for base in bases] == before and torch.equal(step(x), loss(model, x))

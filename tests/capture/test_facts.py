"""What Python may ask of tensors, and set in torch, that a trace does not see as eager has it: refused, or watched."""

import contextlib
import copy
import functools
import pickle
import sys
import warnings

import pytest
import torch
from torch import manual_seed as seed
from torch import nn
from torch import set_autocast_cpu_enabled as autocast
from torch import set_flush_denormal as flush
from torch.autograd.graph import saved_tensors_hooks
from torch.fx._symbolic_trace import is_fx_tracing
from torch.overrides import TorchFunctionMode
from torch.random import get_rng_state as state
from torch.utils.flop_counter import FlopCounterMode

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


def in_low_precision(model, x):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    return model.linear(x)


def without_mkldnn(model, x):
    with torch.backends.mkldnn.flags(enabled=False):
        return model.linear(x)


def benchmarked(model, x):
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    return model.linear(x)


@pytest.mark.filterwarnings("ignore")
def test_forms_of_buffers_that_forward_changes_are_refused():
    """Shape and strides, and what observers of quantization give empty buffers inside an operator."""
    turned = Model(lambda model, x: model.linear(x) * model.table.t_().sum(1))
    turned.register_buffer("table", torch.randn(4, 4))
    with pytest.raises(CaptureError, match="forward reshapes table in place"):
        stepgraph.capture(turned, loss_fn, torch.randn(3, 4), passes="exact")
    observed = Model(lambda model, x: model.observer(model.linear(x)))
    observed.observer = torch.ao.quantization.default_fused_per_channel_wt_fake_quant()
    with pytest.raises(CaptureError, match=r"observer .* on an empty buffer, .* call the model once"):
        stepgraph.capture(observed, loss_fn, torch.randn(3, 4), passes="exact")
    observed(torch.randn(3, 4))
    assert stepgraph.capture(observed, loss_fn, torch.randn(3, 4), passes="exact").verify(torch.randn(3, 4)).bitwise


def test_empty_tensors_that_stay_empty_are_written():
    """Gradients of an empty parameter add up, and a buffer of no elements is scaled in place."""
    model = Model(lambda model, x: model.linear(x) + model.nothing.sum() + model.none.mul_(2).sum())
    model.nothing = nn.Parameter(torch.empty(0, 4))
    model.register_buffer("none", torch.empty(0))
    step = stepgraph.capture(model, loss_fn, torch.randn(4, 4), accumulate=2, passes="exact")
    assert step.verify(torch.randn(4, 4)).bitwise


def in_autocast(model, x):
    torch.set_autocast_enabled("cpu", True)
    y = model.linear(x)
    torch.set_autocast_enabled("cpu", False)
    return y.float()


def in_named_autocast(model, x):
    autocast(True)
    y = model.linear(x * 2)
    autocast(False)
    return y.float()


def strict(model, x):
    torch.use_deterministic_algorithms(True)
    return model.linear(x)


FACTS = {
    "asks for ._version of an input": lambda model, x: model.linear(x) * (1 + model.linear.weight._version),
    "asks for ._version of an": lambda model, x: model.linear(x) * (1 + x.detach()._version),
    "asks for ._base of an input": lambda model, x: model.linear(x) * (1.0 if x._base is None else 2.0),
    "asks for ._is_view of an input": lambda model, x: model.linear(x) * (1 + x._is_view()),
    "asks for .storage_offset.. of the batch": lambda model, x: model.linear(x) * (1 + x[1:].storage_offset()),
    "asks for .is_shared.. of the batch": lambda model, x: model.linear(x) * (1 + x.is_shared()),
    "asks for the size of the memory of the batch": lambda model, x: model.linear(x) * x.untyped_storage().nbytes(),
    "asks for the size of the memory of": lambda model, x: model.linear(x) * x.storage().size(),
    "asks for .is_set_to": lambda model, x: model.linear(x) * (1 + (y := x * 2).is_set_to(y)),
    "asks for tensor.__dict__": lambda model, x: model.linear(x) * len(vars(model.linear.weight)),
    "asks for tensor.__dict__, which": lambda model, x: model.linear(x) * len(x.__dict__),
    "asks for dir.tensor.": lambda model, x: model.linear(x) * len(dir(x)),
    "uses .grad of a parameter": lambda model, x: model.linear(x) * (model.linear.weight.grad is None),
    "uses .grad of": drop_gradient,
    "assigns .data of a tensor": swap,
    "assigns .data of": swap_batch,
    "asks for the device of a tensor's storage": lambda model, x: (
        model.linear(x) * (1 + (x.untyped_storage().device == x.device))
    ),
    "changes torch's setting of default dtype": double,
    "changes torch's setting of deterministic algorithms": strict,
    "changes torch's setting of fp32 precision": in_low_precision,
    "changes torch's setting of mkldnn enabled": without_mkldnn,
    "changes torch's setting of torch.backends.cudnn.benchmark": benchmarked,
    "changes torch's setting of flush denormal": lambda model, x: (
        model.linear(x) * torch.set_flush_denormal(sys.float_info.min / 2 > 0)
    ),
    "changes torch's setting of flush": lambda model, x: model.linear(x) * flush(sys.float_info.min / 2 > 0),
    "switches autocast on by torch.set_autocast_enabled": in_autocast,
    "switches autocast on by a function of torch": in_named_autocast,
    "sets the state of torch's random generator": lambda model, x: model.linear(x) * bool(seed(1)),
    "reads the state of torch's random generator": lambda model, x: model.linear(x) * len(state()),
    "changes torch's setting of num threads": lambda model, x: model.linear(x) * (torch.set_num_threads(7) or 1),
}


@pytest.mark.parametrize("message", FACTS)
def test_facts_that_a_trace_does_not_have(message):
    with pytest.raises(CaptureError, match=rf"the model \(.*test_facts.py:\d+\) {message}") as caught:
        stepgraph.capture(Model(FACTS[message]), loss_fn, torch.randn(3, 4), passes="exact")
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() is torch.float32 and not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu") and sys.float_info.min / 2 > 0


def test_code_that_asks_whether_it_is_traced():
    model = Model(lambda model, x: model.linear(x) * (2 if is_fx_tracing() or torch.compiler.is_compiling() else 1))
    assert stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes="exact").verify(torch.randn(3, 4)).bitwise


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: FlopCounterMode(display=False)])
def test_modes_that_a_step_would_not_follow_are_refused(mode):
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    with mode():
        for call in (lambda: step(x), lambda: stepgraph.capture(model, loss_fn, x)):
            with pytest.raises(CaptureError, match=r"(inference_mode|FlopCounterMode).* is on,.*outside of it"):
                call()


def test_anomaly_mode_is_refused():
    """In eager it raises for a gradient that is NaN."""
    model, x = Model(lambda model, x: model.linear(x)), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    with torch.autograd.detect_anomaly(), pytest.raises(CaptureError, match="detect_anomaly is on"):
        step(x)
    with torch.autograd.detect_anomaly(), pytest.raises(CaptureError, match="detect_anomaly is on"):
        stepgraph.capture(model, loss_fn, x)


def test_facts_of_what_the_step_makes(check_training):
    def forward(self, x):
        y = self.linear(x).add_(1)
        z = y[1:].as_strided((2, 4), (4, 1), y[1:].storage_offset())
        wanted = x.detach().requires_grad_()
        torch.use_deterministic_algorithms(False)  # as it is
        torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled
        torch.set_flush_denormal(sys.float_info.min / 2 == 0)
        return z * (1 + y._version) * (1 + y[1:]._is_view()) * (wanted.grad is None) + y.data.mul_(2)[1:]

    batches = [{"x": torch.randn(3, 4)} for _ in range(3)]
    check_training(Model(forward), lambda model, batch: loss_fn(model, batch["x"]), batches)


def test_types_of_tensors(check_training):
    class Other(type):
        pass

    def forward(self, x):
        w = self.linear.weight
        kinds = [type(x), type(self.linear.weight), type(self.linear.weight * 2), type(w.data)]
        plain = type("Named", (Model,), {"n": 1})
        facts = [kinds == [torch.Tensor, nn.Parameter, torch.Tensor, torch.Tensor], kinds[1] is type(self.linear.bias)]
        facts += [isinstance(Model, type), type(Model) is type, type(Other) == type, type(plain.n) is int]  # noqa: E721
        facts += [issubclass(Other, type), type(w).__name__ == "Parameter", {torch.Tensor: True}.get(type(x), False)]
        assert all(facts), facts  # in eager and in the trace
        return self.linear(x) * (2 if type(x) is torch.Tensor else 3)

    check_training(Model(forward), lambda model, batch: loss_fn(model, batch["x"]), [{"x": torch.randn(3, 4)}], steps=2)
    assert "type" not in globals()


@functools.singledispatch
def number(value):
    return 1


@number.register
def _(value: nn.Parameter):
    return 3


def test_attributes_of_tensors(check_training):
    def forward(self, x):
        w, y = self.linear.weight, self.linear(x)
        found = [t.__class__ is torch.Tensor for t in (x, y, w.data, self.scale)]
        found += [w.__class__ is nn.Parameter, not isinstance(x, list), isinstance(w, nn.Parameter)]
        found += [getattr(t, name, None) is None for t in (x, w, y) for name in ("fake_mode", "real_tensor")]
        found += [not hasattr(y, "constant"), w.kind == w.constant == "whole", not hasattr(y, "kind"), number(w) == 3]
        y.kind = y.constant = "made"
        assert all([*found, y.kind == "made", y.constant == "made"]), found  # in eager and in the trace
        return y * number(w) * (2 if y.__class__ is torch.Tensor else 3)

    model, x = Model(forward), torch.randn(3, 4)
    model.linear.weight.kind = model.linear.weight.constant = "whole"
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    assert step.verify(x).bitwise
    assert torch.Tensor in type(torch._subclasses.FakeTensor).mro(torch._subclasses.FakeTensor)[1:2]  # as before


class Named(nn.Parameter):
    pass


class Decayed(nn.Parameter):
    decay = 0.1


class Twice(torch.Tensor):
    def __matmul__(self, other):
        return super().__matmul__(other) * 2


def test_classes_of_tensors():
    def forward(self, x):
        known = isinstance(self.linear.weight, Named) + 2 * (type(self.linear.weight) is Named)
        return self.linear(x) * (1 + known + 4 * isinstance(x, nn.Parameter))

    model, x = Model(forward), torch.randn(3, 4)
    model.linear.weight = Named(model.linear.weight.data)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for batch in (x, nn.Parameter(x, requires_grad=False), x):
        assert step.verify(batch).bitwise
    with pytest.raises(CaptureError, match="the batch holds a Twice, whose methods"):
        step(x.as_subclass(Twice))
    model.linear.bias = Decayed(model.linear.bias.data)
    with pytest.raises(CaptureError, match=r"linear\.bias is a Decayed, whose methods"):
        stepgraph.capture(model, loss_fn, x)


def test_an_attribute_of_a_parameter_that_is_added():
    model, x = (
        Model(lambda self, x: self.linear(x) * (2 if hasattr(self.linear.weight, "late") else 1)),
        torch.randn(3, 4),
    )
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    model.linear.weight.late = 1
    with pytest.warns(UserWarning, match=r"linear\.weight\.late was added"):
        assert step.verify(x).bitwise


def test_an_attribute_of_a_parameter_that_forward_sets():
    def forward(self, x):
        self.linear.weight.uses = getattr(self.linear.weight, "uses", 0) + 1
        self.linear.bias.kind = "bias"  # as it is
        return self.linear(x) * self.linear.weight.uses

    model, x = Model(forward), torch.randn(3, 4)
    model.linear.bias.kind = "bias"
    with pytest.raises(CaptureError, match=r"forward sets linear\.weight\.uses, which"):
        stepgraph.capture(model, loss_fn, x, passes="exact")
    with pytest.warns(UserWarning, match=r"forward sets linear\.weight\.uses, which"):
        stepgraph.capture(model, loss_fn, x, passes=["fuse_norm"])
    assert not hasattr(model.linear.weight, "uses")


@pytest.mark.parametrize("held", [[0], {"uses": 0}], ids=["list", "dict"])
def test_what_an_attribute_of_a_parameter_holds_and_forward_changes(held):
    def forward(self, x):
        key = "uses" if isinstance(held, dict) else 0
        self.linear.weight.memo[key] += 1
        return self.linear(x) * self.linear.weight.memo[key]

    model, x = Model(forward), torch.randn(3, 4)
    model.linear.weight.memo = held
    with pytest.raises(CaptureError, match=r"linear\.weight\.memo"):
        stepgraph.capture(model, loss_fn, x, passes="exact")


SHOWN = {
    "str": lambda x: len(str(x)),
    "format": lambda x: len(f"{x}"),
    "format of an item": lambda x: len(f"{x.sum()}"),
    "percent": lambda x: len("%s" % x),  # noqa: UP031
    "repr of a list": lambda x: len(repr([x])),
    "print": lambda x: bool(print(x)),
    "deepcopy": lambda x: copy.deepcopy(x).ndim,
    "pickle": lambda x: len(pickle.dumps(x)),
    "size": lambda x: len(torch.Size([x.sum().long()])),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_text_and_copies_need_values(kind):
    model = Model(lambda model, x: model.linear(x) * SHOWN[kind](x))
    with pytest.raises(CaptureError, match=r"cannot capture the model at .*test_facts.py:\d+: .* value") as caught:
        stepgraph.capture(model, loss_fn, torch.randn(3, 4), passes=[])
    assert "\n" not in str(caught.value)


def test_what_the_loss_puts_into_its_batch():
    def setting(model, batch):
        batch["y"] = model(batch["x"])
        return batch["y"].square().mean()

    def copying(model, batch):
        batch = dict(batch)
        unused = batch.pop("unused")
        return setting(model, batch) + unused.mean()

    model, batch = Model(lambda model, x: model.linear(x)), {"x": torch.randn(3, 4), "unused": torch.ones(1)}
    with pytest.raises(CaptureError, match=r"sets batch\['y'\].*begin loss_fn with batch = dict\(batch\)"):
        stepgraph.capture(model, setting, batch, passes="exact")
    with pytest.warns(UserWarning, match=r"sets batch\['y'\]"):
        stepgraph.capture(model, setting, batch, passes=["fuse_norm"])
    step = stepgraph.capture(model, copying, batch, passes="exact")
    assert torch.equal(step(batch), copying(model, batch)) and list(batch) == ["x", "unused"]


RESHAPES = {
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapdims_": lambda y: y.swapdims_(0, 1),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.unsqueeze_(0).squeeze_(0),
    "as_strided_": lambda y: y.as_strided_((4, 3), (1, 4)),
    "resize_": lambda y: y.resize_(2, 6),
    "resize_as_": lambda y: y.resize_as_(torch.empty(2, 2)),
    "detach_": lambda y: y.detach_(),
    "set_": lambda y: y.set_(torch.linspace(0, 1, 12).view(4, 3)),
    "set_ to nothing": lambda y: y.set_(),
}


def reshaping(model, x):
    y, total = model.linear(x), 0.0
    for i, reshape in enumerate(RESHAPES.values()):
        z = y.detach().clone() if i % 2 else y.data
        reshape(z)
        total = total + z.mul_(1.01).sin().mean() + y.square().mean()
    w = y * 2
    w.unsqueeze_(0)
    return w.transpose_(1, 2) * total.nan_to_num(1.0)


def test_reshapes_in_place(check_training):
    run, batches = lambda model, batch: loss_fn(model, batch["x"]), [{"x": torch.randn(3, 4)} for _ in range(2)]
    step = check_training(Model(reshaping), run, batches, steps=3)
    called = [n.target for n in step.graph.graph.nodes if n.op == "call_function"]
    assert not [target for target in called if torch.Tag.inplace_view in getattr(target, "tags", ())]


@pytest.mark.long
def test_compiled_reshapes_in_place():
    """Inductor made one tensor of ``y`` and ``y.data``, and so of its new form."""
    step = stepgraph.capture(Model(reshaping), loss_fn, torch.randn(3, 4), passes=["inductor"])
    assert step.verify(torch.randn(3, 4)).close


def test_a_batch_is_reshaped_for_its_caller():
    model, x = Model(lambda model, x: model.linear(x.unsqueeze_(0).mul_(2))), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    mine, eager = x.clone(), x.clone()
    assert torch.equal(step(mine), loss_fn(model, eager)) and torch.equal(mine, eager)


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


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.tanh else made


@pytest.mark.parametrize("around", [Doubling(), saved_tensors_hooks(lambda t: t * 2, lambda t: t + 1)])
def test_what_is_open_around_a_call_alone(around):
    model, x = Model(lambda model, x: torch.tanh(model.linear(x))), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for context in (contextlib.nullcontext(), around, contextlib.nullcontext()):
        with context:
            step(x)
            made = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            loss_fn(model, x).backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), made, strict=True))
        model.zero_grad()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="of a later torch")
def test_a_gradient_in_another_dtype_than_its_parameter():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    with pytest.raises(CaptureError, match=r"weight has grad_dtype torch.float32.* parameter's torch.bfloat16"):
        stepgraph.capture(model, loss_fn, torch.randn(3, 4, dtype=torch.bfloat16), passes="exact")

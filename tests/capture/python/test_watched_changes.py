"""Changes that no value shows, of what forward and the loss read: each is followed or refused."""

import abc
import collections
import contextvars
import copy
import enum
import functools
import operator
import os
import random
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError
from tests.capture.python.test_watched import (
    Describing,
    Net,
    Number,
    Options,
    PlainCriterion,
    check_follows,
    plain_loss,
    set_item,
    to,
)


class Weak:
    """A descriptor that keeps its values by weak references to their owners."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        return self if owner is None else self.values.get(owner, 1.0)

    def __set__(self, owner, value):
        self.values[owner] = value


class Described:
    scale = Weak()


SCALES = {"one": 1.0}


class Looking:
    """A descriptor whose function calls another."""

    def __get__(self, owner, kind=None):
        return looked_up()


def looked_up():
    return SCALES["one"]


class Looked:
    scale = Looking()


class Counted(type):
    @property
    def scale(cls):
        return cls.hidden


class Base:
    scale = 1.0


class Derived(Base):
    pass


def factory():
    return collections.defaultdict(lambda: 1.0)


class Other(Base):
    scale = 4.0


class Flag(threading.Event):
    @property
    def scale(self):
        return 2.0 if self.is_set() else 1.0


def reading(read, **held):
    """A model whose factor is ``read(model)``."""
    model = type("Reading", (Net,), {"value": lambda self: float(read(self))})()
    for name, value in held.items():
        setattr(model, name, value)
    return model


def with_scale(held):
    held.scale = 1.0
    return held


def scale_of(held):
    return held.scale


def nothing(held):
    pass


def own(base):
    return type("Own", (base,), {})()


#: How an object is made, what a model's attribute ``kept`` is made of it (None: the object itself), what is read of
#: that, and how the object changes.
HELD = {
    "order of a dictionary": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        None,
        lambda held: next(iter(held.values())),
        lambda held: held.move_to_end("a"),
    ),
    "copy of an object": (lambda: Options(1.0), None, lambda held: copy.deepcopy(held).scale, to("scale")),
    "new attribute of a function": (lambda: lambda: 0, None, lambda held: getattr(held, "scale", 1.0), to("scale")),
    "behind a descriptor": (Describing, None, scale_of, to("scale")),
    "code behind a descriptor": (
        lambda: (SCALES.update(one=1.0), Looked())[1],
        *(None, scale_of, lambda held: SCALES.update(one=2.0)),
    ),
    "number in a parameter dict": (
        lambda: nn.ParameterDict({"a": torch.ones(())}),
        None,
        lambda held: sum(float(v) for v in held.values() if isinstance(v, float)) + 1.0,
        lambda held: held.update({"b": 2.0}),
    ),
    "weak keys": (Described, None, scale_of, to("scale")),
    "factory": (factory, None, lambda held: held.default_factory(), to("default_factory", lambda: 2.0)),
    "attribute of an enum": (lambda: with_scale(enum.Enum("Kind", "ONE").ONE), None, scale_of, to("scale")),
    "attribute of a number": (lambda: with_scale(Number(1.0)), None, scale_of, to("scale")),
    "class of an object": (Derived, None, scale_of, to("__class__", Other)),
    "shadowed in a class": (lambda: own(Derived), None, scale_of, lambda held: to("scale", 3.0)(type(held))),
    "bases of a class": (lambda: own(Derived), None, scale_of, lambda held: to("__bases__", (Other,))(type(held))),
    "event": (Flag, None, scale_of, Flag.set),
    "weak reference": (lambda: Options(1.0), weakref.ref, lambda kept: kept().scale, to("scale")),
    "weak dictionary": (
        *(lambda: Options(1.0), lambda held: weakref.WeakValueDictionary(a=held)),
        *(lambda kept: kept["a"].scale, to("scale")),
    ),
    "view of values": (lambda: {"a": 1.0}, dict.values, sum, lambda held: held.update(b=2.0)),
    "view of items": (lambda: {"a": 1.0}, dict.items, lambda kept: sum(v for _, v in kept), set_item("a", 2.0)),
    "method of C": (lambda: [1.0], lambda held: held.__getitem__, lambda kept: kept(0), set_item(0, 2.0)),
}
#: The same of objects in a closure: how one is made, what is read of it, how it changes.
ENCLOSED = {
    "missing of a namespace": (types.SimpleNamespace, lambda held: getattr(held, "scale", 1.0), to("scale")),
    "context variable": (
        lambda: contextvars.ContextVar("variable", default=1.0),
        *(lambda held: held.get(), lambda held: held.set(2.0)),
    ),
    "metaclass": (lambda: Counted("Own", (), {"hidden": 1.0}), scale_of, to("hidden")),
    "attribute of a tensor": (lambda: with_scale(torch.ones(2)), scale_of, to("scale")),
    "value of a tensor": (lambda: torch.tensor(1.0), lambda held: held.item(), lambda held: held.fill_(2.0)),
    "values of a tensor": (lambda: torch.ones(2), lambda held: held.tolist()[1], lambda held: held.fill_(2.0)),
}
VARIABLE = "A_SCALE_OF_A_TEST"
#: What is done to a model first, what it reads, and how it changes.
OF_THE_MODEL = {
    "buffer that was none": (
        lambda m: m.register_buffer("empty", None),
        *(lambda m: 1.0 if m.empty is None else 2.0, to("empty", torch.ones(2))),
    ),
    "attribute through the dict": (nothing, lambda m: m.__dict__.get("scale", 1.0), to("scale")),
    "object of C": (
        *(to("get", operator.itemgetter(0)), lambda m: m.get((1.0, 2.0))),
        to("get", operator.itemgetter(1)),
    ),
    "class of the model": (nothing, lambda m: 1.0, to("__class__", type("Own", (Net,), {"value": lambda self: 2.0}))),
    "parameter added": (
        *(nothing, lambda m: len(list(m.parameters()))),
        lambda m: m.linear.register_parameter("more", nn.Parameter(torch.ones(1))),
    ),
    "buffer added": (
        *(nothing, lambda m: len(list(m.buffers())) + 1),
        lambda m: m.linear.register_buffer("more", torch.ones(1)),
    ),
    "submodule of a leaf": (
        *(nothing, lambda m: len(list(m.modules()))),
        lambda m: m.sub.add_module("more", nn.Identity()),
    ),
    "attribute of a parameter": (
        *(lambda m: with_scale(m.linear.weight), lambda m: m.linear.weight.scale),
        lambda m: to("scale")(m.linear.weight),
    ),
    # ``isinstance`` and ``get_parameter`` see a parameter in a trace too.
    "new attribute of a parameter": (
        nothing,
        lambda m: getattr(m.get_parameter("linear.weight"), "scale", 1.0) + isinstance(m.linear.weight, nn.Parameter),
        lambda m: to("scale")(m.linear.weight),
    ),
    "default dtype": (
        to("undo", lambda: torch.set_default_dtype(torch.float32)),
        *(lambda m: torch.ones(1).element_size(), lambda m: torch.set_default_dtype(torch.float64)),
    ),
    "mode of a new module": (
        to("sub", nn.Sequential(nn.Identity())),
        *(lambda m: 1.0 + m.sub.training, lambda m: to("sub", nn.Identity().eval())(m)),
    ),
    "environment": (
        lambda m: os.environ.update({VARIABLE: "1"}),
        *(lambda m: os.getenv("A_SCALE_OF_A_TEST"), lambda m: os.environ.update({VARIABLE: "2"})),
    ),
    "whole environment": (
        lambda m: os.environ.pop(VARIABLE, None),
        lambda m: float(dict(os.environ).get("A_SCALE_OF_A_TEST", 1)),
        lambda m: os.environ.update({VARIABLE: "2"}),
    ),
}


def forward_of_a_class():
    class Own(nn.Linear):
        pass

    model = Net()
    model.linear = Own(4, 4)
    return model, lambda: setattr(Own, "forward", lambda self, x: x @ self.weight)


def module_imported_in_forward():
    module = sys.modules["module_of_a_test"] = types.ModuleType("module_of_a_test")
    module.settings = types.SimpleNamespace(scale=1.0)

    def read(m):
        from module_of_a_test import settings

        return settings.scale

    return reading(read), lambda: setattr(module.settings, "scale", 2.0)


def state_of_a_hook():
    held, model = Options(1.0), Net()
    model.linear.register_forward_hook(lambda module, args, y: y * held.scale)
    return model, lambda: setattr(held, "scale", 2.0)


def state_of_a_hook_of_every_module():
    held, model = Options(1.0), Net()
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * held.scale if m is model.linear else None)
    model.undo = hook.remove
    return model, lambda: setattr(held, "scale", 2.0)


class Single:
    scale = 1.0

    def __new__(cls):
        if not hasattr(cls, "only"):
            cls.only = with_scale(super().__new__(cls))
        return cls.only


def object_made_in_the_trace():
    if hasattr(Single, "only"):
        del Single.only
    return reading(lambda m: Single().scale), lambda: setattr(Single(), "scale", 2.0)


def from_table(name):
    """The model of a row of the tables, and its change."""
    if name in OF_THE_MODEL:
        prepare, read, change = OF_THE_MODEL[name]
        held = model = reading(read)
        prepare(model)
    elif name in ENCLOSED:
        make, read, change = ENCLOSED[name]
        held = make()
        model = reading(lambda m: read(held))
    else:
        make, keep, read, change = HELD[name]
        held = make()
        model = reading(lambda m: read(m.kept), kept=keep(held) if keep else held)
    return model, lambda: change(held)


WRITTEN = (
    *(object_made_in_the_trace, forward_of_a_class, module_imported_in_forward),
    *(state_of_a_hook, state_of_a_hook_of_every_module),
)
UNSEEN = {kind.__name__.replace("_", " "): kind for kind in WRITTEN}
UNSEEN |= {name: functools.partial(from_table, name) for name in [*HELD, *ENCLOSED, *OF_THE_MODEL]}
#: What people do most; the others are for the long tests.
USUAL = {
    *("context variable", "state of a hook", "parameter added", "value of a tensor", "forward of a class"),
    *("whole environment", "buffer that was none", "new attribute of a parameter", "attribute through the dict"),
    *("order of a dictionary", "copy of an object", "new attribute of a function", "behind a descriptor"),
    *("missing of a namespace", "object made in the trace", "number in a parameter dict"),
}
assert set(UNSEEN) >= USUAL


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.long) for n in UNSEEN])
def test_a_change_that_no_value_shows(name):
    model, change = UNSEEN[name]()
    try:
        check_follows(model, plain_loss, [lambda: None, change])
    finally:
        vars(model).get("undo", lambda: None)()


FACTORS = [1.0]


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * Scaled.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTORS[0]


@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize("change", [lambda v: setattr(Scaled, "factor", v), lambda v: FACTORS.__setitem__(0, v)])
def test_what_a_function_of_autograd_reads_is_watched(change):
    """Autograd calls its methods, which no code names."""
    model, x, grads = nn.Linear(4, 4), torch.randn(3, 4), []
    step = stepgraph.capture(model, scaled_loss, x, passes="exact")
    try:
        for value in (1.0, 2.0):
            change(value)
            for run in (step, lambda x: scaled_loss(model, x).backward()):
                model.zero_grad()
                run(x)
                grads.append(model.weight.grad.clone())
    finally:
        change(1.0)
    assert torch.equal(*grads[:2]) and torch.equal(*grads[2:]) and not torch.equal(*grads[1:3])


def scaled_loss(model, x):
    return Scaled.apply(model(x)).square().mean()


@pytest.mark.parametrize("make", [type, types.new_class])
def test_an_object_of_an_abstract_class_made_by_a_call(make):
    """Such a class says that it is of Python's module ``abc`` or ``types``."""
    given = make("Made", (abc.ABC,), {})()

    def loss_fn(model, x):
        return model(x).square().mean() * given.factor

    check_follows(nn.Linear(4, 4), loss_fn, [lambda v=v: setattr(given, "factor", v) for v in (1.0, 3.0)])


@pytest.mark.parametrize("make", [type, types.new_class])
def test_a_class_made_by_a_call_from_an_abstract_one(make):
    given = make("Made", (abc.ABC,), {})

    def loss_fn(model, x):
        return model(x).square().mean() * getattr(given, "fac" + "tor")

    check_follows(nn.Linear(4, 4), loss_fn, [lambda v=v: setattr(given, "factor", v) for v in (1.0, 3.0)])


def test_a_module_that_replaced_another_is_watched_too():
    model, x = reading(lambda m: 1.0 + m.sub.training), torch.randn(3, 4)
    step = stepgraph.capture(model, plain_loss, x, passes="exact")
    for change in (lambda: setattr(model, "sub", nn.Identity()), lambda: model.sub.eval()):
        change()
        assert torch.equal(step(x), plain_loss(model, x).detach())


def drawing_in_a_closure():
    numbers = np.random.default_rng(0)
    return lambda model, x: model(x).square().mean() * numbers.random()


def drawing_in_an_object():
    criterion = PlainCriterion()
    criterion.held = Options(random.Random(0))
    return lambda model, x: model(x).square().mean() * criterion.held.scale.random()


@pytest.mark.parametrize("kind", [drawing_in_a_closure, drawing_in_an_object])
def test_generators_of_the_host_outside_of_the_model_are_refused(kind):
    loss_fn, model, x = kind(), nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"test_watched_changes.py:\d+\) draws numbers from the generator") as caught:
        stepgraph.capture(model, loss_fn, x, passes=stepgraph.StepOptions(inductor="off"))
    assert "\n" not in str(caught.value)


def test_an_array_of_objects_is_refused():
    held = np.array([Options(1.0)], dtype=object)
    with pytest.raises(CaptureError, match="ndarray of objects"):
        stepgraph.capture(reading(lambda m: m.kept[0].scale, kept=held), plain_loss, torch.randn(3, 4), passes="exact")

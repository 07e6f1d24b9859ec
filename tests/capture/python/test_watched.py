"""Whatever forward and the loss read in Python is compared at each call: kinds of values x places x kinds of change."""

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import operator
import os
import random
import sys
import threading
import types
import typing
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError

GLOBAL = None


class Level(enum.Enum):
    LOW, MIDDLE, HIGH = 1.0, 2.0, 3.0


@dataclasses.dataclass
class Record:
    scale: float
    inner: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Options:
    def __init__(self, scale):
        self.scale = scale


class Computed:
    """Its attribute is a property."""

    def __init__(self, scale):
        self._scale = scale

    @property
    def scale(self):
        return self._scale * 1


class Mapped:
    """Its attribute is found by ``__getattr__``."""

    def __init__(self, scale):
        self.options = {"scale": scale}

    def __getattr__(self, name):
        if name == "scale":
            return self.options[name]
        raise AttributeError(name)


class Called:
    def __init__(self, scale):
        self.factor = scale

    def __call__(self, x):
        return x * self.factor


class Pair(typing.NamedTuple):
    scale: float
    more: list


class Scaling(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.factor = scale

    def forward(self, x):
        return x * self.factor


class Number(float):
    """A class of its own that is a number."""


def scaled(scale, x):
    return x * scale


def shifted(x, *, by):
    return x + by


def used(value, x):
    """``x`` multiplied by what ``value`` says."""
    if isinstance(value, nn.Module) or callable(value):
        return value(x)
    if isinstance(value, torch.Tensor):
        return x * value
    return x * number(value)


def number(value):
    if hasattr(value, "scale"):
        return number(value.scale)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return float(value.sum())
    if isinstance(value, str):
        return float(len(value))
    if isinstance(value, (bytes, bytearray, array.array)):
        return float(sum(value))
    if isinstance(value, (dict, collections.UserDict)):
        return number(list(value.values()))
    if isinstance(value, (list, tuple, set, frozenset, collections.deque, range)):
        return 1.0 + sum(number(item) for item in value)
    if isinstance(value, torch.dtype):
        return float(value.itemsize)
    return float(value)


def added(scale):
    return lambda x: x + scale


#: A value for each of three steps.
KINDS = {
    "float": (1.5, 2.5, 3.5),
    "int and bool": (1, 2, True),
    "interpolated": tuple(np.interp(i, [0, 5], [1, 2]) for i in (0, 1, 2)),
    "numpy float": tuple(map(np.float32, (1.5, 2.5, 3.5))),
    "numpy int": tuple(map(np.int64, (2, 3, 4))),
    "own number": tuple(map(Number, (1.5, 2.5, 3.5))),
    "string": ("a", "bb", "ccc"),
    "enum": tuple(Level),
    "dtype": (torch.float16, torch.float32, torch.float64),
    "none": (0.5, 1.5, 0.25),
    "size": tuple(map(torch.Size, ([2], [3], [2, 2]))),
    "range": (range(2), range(3), range(4)),
    "array": tuple(np.full(3, i) for i in (1.0, 2.0, 3.0)),
    "bytes": (b"\1", b"\2", bytearray(b"\3")),
    "array of python": tuple(array.array("d", [i]) for i in (1.0, 2.0, 3.0)),
    "dataclass": tuple(map(Record, (1.5, 2.5, 3.5))),
    "frozen dataclass": tuple(map(Frozen, (1.5, 2.5, 3.5))),
    "nested dataclass": tuple(Record(Record(np.float64(i))) for i in (1.5, 2.5, 3.5)),
    "namespace": tuple(types.SimpleNamespace(scale=i) for i in (1.5, 2.5, 3.5)),
    "slots": tuple(map(Slots, (1.5, 2.5, 3.5))),
    "object": tuple(map(Options, (1.5, 2.5, 3.5))),
    "property": tuple(map(Computed, (1.5, 2.5, 3.5))),
    "getattr": tuple(map(Mapped, (1.5, 2.5, 3.5))),
    "namedtuple": tuple(Pair(i, [i]) for i in (1.5, 2.5, 3.5)),
    "list": ([1.0], [2.0], [2.0, 3.0]),
    "nested list": ([[1.0], [2.0]], [[1.0], [3.0]], [[1.0, 3.0], []]),
    "long list": tuple([float(i)] * 1000 for i in (1, 2, 3)),
    "list of objects": tuple([Record(i)] for i in (1.5, 2.5, 3.5)),
    "tuple": ((1.0, 2.0), (1.0, 3.0), (1.0,)),
    "dict": ({"a": 1.0}, {"a": 2.0}, {"a": 2.0, "b": 3.0}),
    "nested dict": tuple({"a": {"b": [i]}} for i in (1.0, 2.0, 3.0)),
    "ordered dict": tuple(collections.OrderedDict(a=i) for i in (1.0, 2.0, 3.0)),
    "defaultdict": tuple(collections.defaultdict(float, a=i) for i in (1.0, 2.0, 3.0)),
    "user dict": tuple(collections.UserDict(a=i) for i in (1.0, 2.0, 3.0)),
    "deque": tuple(collections.deque([i], maxlen=4) for i in (1.0, 2.0, 3.0)),
    "set": ({1.0}, {2.0}, {2.0, 3.0}),
    "frozenset": tuple(frozenset([i]) for i in (1.0, 2.0, 3.0)),
    "function": (torch.tanh, torch.sin, torch.cos),
    "lambda": (lambda x: x * 2, lambda x: x * 3, lambda x: x * 4),
    "closure": tuple(map(added, (1.0, 2.0, 3.0))),
    "partial": tuple(functools.partial(scaled, i) for i in (1.5, 2.5, 3.5)),
    "bound method": tuple(Called(i).__call__ for i in (1.5, 2.5, 3.5)),
    "callable": tuple(map(Called, (1.5, 2.5, 3.5))),
    "module": tuple(map(Scaling, (1.5, 2.5, 3.5))),
    "tensor": tuple(map(torch.tensor, (1.5, 2.5, 3.5))),
    "list of tensors": tuple([torch.tensor(i)] for i in (1.5, 2.5, 3.5)),
}


class Net(nn.Module):
    held = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.sub, self.options = nn.Linear(4, 4), nn.Identity(), Options(None)
        self.several, self.by_name = [None], {"value": None}

    def value(self):
        return 1.0

    def forward(self, x):
        return used(self.value(), self.linear(x))


class Attribute(Net):
    def value(self):
        return self.held


class Sub(Net):
    def value(self):
        return self.sub.held


class Nested(Net):
    def value(self):
        return self.options.scale


class Element(Net):
    def value(self):
        return self.several[0]


class Item(Net):
    def value(self):
        return self.by_name["value"]


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = None

    def forward(self, y):
        return used(self.held, y).square().mean()


class PlainCriterion:
    def __init__(self):
        self.held = None

    def __call__(self, model, x):
        return used(self.held, model(x)).square().mean()

    def method(self, model, x):
        return used(self.held, model(x)).square().mean()


def plain_loss(model, x):
    return model(x).square().mean()


def of_model(kind, put):
    def make():
        model = kind()
        return model, plain_loss, lambda value: put(model, value)

    return make


def in_criterion():
    criterion = Criterion()
    return Net(), lambda model, x: criterion(model(x)), lambda value: setattr(criterion, "held", value)


def in_object():
    criterion = PlainCriterion()
    return Net(), criterion, lambda value: setattr(criterion, "held", value)


def in_self():
    criterion = PlainCriterion()
    return Net(), criterion.method, lambda value: setattr(criterion, "held", value)


def in_closure():
    held = None

    def put(value):
        nonlocal held
        held = value

    return Net(), lambda model, x: used(held, model(x)).square().mean(), put


def in_global():
    def put(value):
        global GLOBAL
        GLOBAL = value

    return Net(), lambda model, x: used(GLOBAL, model(x)).square().mean(), put


def in_default():
    def loss_fn(model, x, held=None):
        return used(held, model(x)).square().mean()

    return Net(), loss_fn, lambda value: setattr(loss_fn, "__defaults__", (value,))


def in_keyword():
    def loss_fn(model, x, *, held=None):
        return used(held, model(x)).square().mean()

    return Net(), loss_fn, lambda value: loss_fn.__kwdefaults__.update(held=value)


def in_partial():
    def loss_fn(model, x, held):
        return used(held, model(x)).square().mean()

    given = functools.partial(loss_fn, held=None)
    return Net(), given, lambda value: given.keywords.update(held=value)


def on_function():
    def loss_fn(model, x):
        return used(loss_fn.held, model(x)).square().mean()

    return Net(), loss_fn, lambda value: setattr(loss_fn, "held", value)


def in_class():
    class Own(Net):
        held = None

        def value(self):
            return type(self).held

    return Own(), plain_loss, lambda value: setattr(Own, "held", staticmethod(value) if callable(value) else value)


PLACES = {
    "attribute": of_model(Attribute, lambda m, value: setattr(m, "held", value)),
    "submodule": of_model(Sub, lambda m, value: setattr(m.sub, "held", value)),
    "nested": of_model(Nested, lambda m, value: setattr(m.options, "scale", value)),
    "element": of_model(Element, lambda m, value: m.several.__setitem__(0, value)),
    "item": of_model(Item, lambda m, value: m.by_name.update(value=value)),
    "criterion": in_criterion,
    "object": in_object,
    "self": in_self,
    "closure": in_closure,
    "global": in_global,
    "default": in_default,
    "keyword default": in_keyword,
    "partial": in_partial,
    "function attribute": on_function,
    "class": in_class,
}


def check_follows(model, loss_fn, changes):
    """The captured step equals eager after each of ``changes``."""
    torch.manual_seed(0)
    x, steps = torch.randn(3, 4), []
    changes[0]()
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for change in (lambda: None, *changes[1:], lambda: None):
        change()
        model.zero_grad()
        expected = loss_fn(model, x)
        expected.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps.append(step(x))
        assert torch.equal(steps[-1], expected.detach())
        assert all(map(torch.equal, grads, [p.grad for p in model.parameters() if p.grad is not None]))
    assert len({float(s) for s in steps}) > 1, "no change shows in the loss"


def _some(pairs):
    """All pairs of a kind and a place; each kind and each place a few times in the default tests."""
    for i, (kind, place) in enumerate(pairs):
        quick = place == list(PLACES)[i // len(PLACES) % len(PLACES)] or (kind == "float" and place != "attribute")
        yield pytest.param(kind, place, marks=[] if quick else pytest.mark.long)


@pytest.mark.parametrize(("kind", "place"), [*_some(itertools.product(KINDS, PLACES))])
def test_a_value_that_is_replaced(kind, place):
    if place in ("attribute", "submodule", "criterion") and kind == "module":
        pytest.skip("a submodule")
    model, loss_fn, put = PLACES[place]()
    check_follows(model, loss_fn, [functools.partial(put, value) for value in KINDS[kind]])


class Holder(nn.Module):
    """A model that reads one attribute, ``held``."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x):
        return used(self.held, self.linear(x))


class Missing(Holder):
    """Reads an attribute that may be missing."""

    def forward(self, x):
        return self.linear(x) * getattr(self.held, "extra", 1.0) * getattr(self, "factor", 1.0)


def set_scale(held, by):
    held.scale = by


def set_item(index, value):
    return lambda held: held.__setitem__(index, value)


#: (a value, changes of it in place)
IN_PLACE = {
    "list": ([1.0, 2.0], [set_item(0, 3.0), lambda held: held.append(4.0), lambda held: held.pop()]),
    "nested list": ([[1.0], [2.0]], [lambda held: held[1].append(3.0), lambda held: held[0].clear()]),
    "dict": ({"a": 1.0, "b": 2.0}, [set_item("a", 3.0), lambda held: held.pop("b"), lambda held: held.update(c=1.0)]),
    "nested dict": ({"a": {"b": [1.0]}}, [lambda held: held["a"]["b"].append(2.0), lambda held: held["a"].clear()]),
    "set": ({1.0}, [lambda held: held.add(2.0), lambda held: held.discard(1.0)]),
    "deque": (collections.deque([1.0]), [lambda held: held.append(2.0), lambda held: held.popleft()]),
    "user dict": (collections.UserDict(a=1.0), [set_item("a", 2.0), set_item("b", 2.0)]),
    "array": (np.ones(3), [lambda held: held.fill(2.0), set_item(0, 5.0)]),
    "bytes": (bytearray(b"\1\2"), [set_item(0, 5), lambda held: held.append(7)]),
    "dataclass": (Record(1.0), [functools.partial(set_scale, by=2.0), functools.partial(set_scale, by=np.float32(3))]),
    "dataclass in one": (Record(Record(1.0)), [lambda held: setattr(held.scale, "scale", 2.0)]),
    "namespace": (types.SimpleNamespace(scale=1.0), [lambda held: setattr(held, "scale", 2.0)]),
    "slots": (Slots(1.0), [lambda held: setattr(held, "scale", 2.0)]),
    "property": (Computed(1.0), [lambda held: setattr(held, "_scale", 2.0)]),
    "getattr": (Mapped(1.0), [lambda held: held.options.update(scale=2.0)]),
    "callable": (Called(1.0), [lambda held: setattr(held, "factor", 2.0)]),
    "list of objects": ([Record(1.0), Record(2.0)], [lambda held: setattr(held[1], "scale", 3.0)]),
    "module": ([Scaling(1.0)], [lambda held: setattr(held[0], "factor", 2.0)]),
    "tensor": (torch.tensor(1.5), [lambda held: held.mul_(2), lambda held: setattr(held, "data", torch.tensor(7.0))]),
    "partial": (functools.partial(shifted, by=2.0), [lambda held: held.keywords.update(by=3.0)]),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_value_that_is_changed_in_place(kind):
    held, changes = IN_PLACE[kind]
    if kind == "module":
        model = Holder(None)
        model.held, model.forward = held, lambda x: held[0](model.linear(x))
    else:
        model = Holder(held)
    check_follows(model, plain_loss, [lambda: None, *(functools.partial(change, held) for change in changes)])


def test_what_was_missing_and_what_is_deleted():
    model = Missing(Record(1.0))
    check_follows(
        model,
        plain_loss,
        [
            lambda: None,
            lambda: setattr(model.held, "extra", 2.0),
            lambda: setattr(model, "factor", 3.0),
            lambda: delattr(model.held, "extra"),
            lambda: delattr(model, "factor"),
        ],
    )


# ---- state outside the model ----


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.dropout, self.norm = (
            nn.Linear(4, 4),
            nn.Dropout(0.5),
            nn.BatchNorm1d(4, track_running_stats=False),
        )
        self.register_buffer("weights", torch.rand(4))
        self.requires_grad_(False)

    def forward(self, x):
        return self.dropout(self.net(x)) * self.weights


OUTSIDE = {
    "in place": lambda t: t.net.weight.mul_(2),
    "data": lambda t: setattr(t.net.weight, "data", t.net.weight.data * 2),
    "loaded": lambda t: t.load_state_dict({k: v * 2 for k, v in t.state_dict().items()}),
    "assigned": lambda t: t.load_state_dict({k: v * 2 for k, v in t.state_dict().items()}, assign=True),
    "eval": lambda t: t.eval(),
    "buffer replaced": lambda t: setattr(t, "weights", torch.rand(4) + 2),
    "buffer deleted": lambda t: t.register_buffer("weights", torch.ones(4)),
    "layer replaced": lambda t: setattr(t, "net", nn.Linear(4, 4).requires_grad_(False)),
    "hook": lambda t: t.net.register_forward_hook(lambda m, a, y: y * 3) and None,
    "option": lambda t: setattr(t.dropout, "p", np.float64(0.0)),
    "method": lambda t: setattr(t, "forward", lambda x: t.net(x) * 5),
    "dtype": lambda t: t.double(),
}


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize("held", ["closure", "object"])
def test_a_module_outside_of_the_model(kind, held):
    teacher, change = Teacher(), OUTSIDE[kind]
    if kind not in ("eval", "option"):
        teacher.eval()
    if held == "closure":

        def loss_fn(model, x):
            with torch.no_grad():
                target = teacher(x.to(teacher.net.weight.dtype)).float()
            return (model(x) - target).square().mean()

    else:
        trainer = types.SimpleNamespace(reference=[teacher])

        def loss_fn(model, x, trainer=trainer):
            with torch.no_grad():
                target = trainer.reference[0](x.to(teacher.net.weight.dtype)).float()
            return (model(x) - target).square().mean()

    def changed():
        with torch.no_grad():
            change(teacher)

    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    for todo in (lambda: None, changed, lambda: None):
        todo()
        torch.manual_seed(1)
        expected = loss_fn(model, x).detach()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(step(x), expected)


# ---- what the loss itself changes ----


class Center(nn.Module):
    """Reassigns a buffer, as DINO's loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, y):
        loss = (y - self.center).square().mean()
        self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        return loss


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.history, self.by_name = 0, [], {}

    def forward(self, y):
        self.count += 1
        return y.square().mean() * (self.count > 100)


class Logging(Counting):
    def forward(self, y):
        self.history.append(y.detach().mean())
        return y.square().mean()


class Noting(Counting):
    def forward(self, y):
        self.by_name[len(self.by_name)] = float(len(y))
        return y.square().mean()


@pytest.mark.parametrize("kind", [Center, Counting, Logging, Noting])
def test_what_the_loss_changes_outside_of_the_model_is_refused(kind):
    criterion, x, model = kind(), torch.randn(3, 4), nn.Linear(4, 4)
    before = [dict(vars(criterion)), dict(criterion._buffers), list(criterion.history) if kind is not Center else []]
    with pytest.raises(CaptureError, match=r"the loss (keeps a tensor of the step in|sets) [a-zA-Z_]+\.\w+") as caught:
        stepgraph.capture(model, lambda m, b: criterion(m(b)), x, passes="exact")
    assert "\n" not in str(caught.value)
    assert before == [dict(vars(criterion)), dict(criterion._buffers), criterion.history if kind is not Center else []]
    criterion(model(x))  # no fake tensor is left


def test_a_norm_outside_of_the_model_that_only_reads_its_statistics():
    teacher, model, x = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, lambda m, b: (m(b) - teacher.eval()(b)).square().mean(), x, passes="exact")
    assert step.verify(x).bitwise
    with pytest.raises(CaptureError, match=r"writes into a tensor that is neither .* or call its eval"):
        stepgraph.capture(model, lambda m, b: (m(b) - teacher.train()(b)).square().mean(), x, passes="exact")


class Counter:
    count = 0


def test_a_count_in_a_class_is_refused_and_set_back():
    def loss_fn(model, x):
        Counter.count += 1
        return model(x).mean() * Counter.count

    with pytest.raises(CaptureError, match=r"Counter.count counts in Python: 0 -> 1"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, torch.randn(3, 4), passes="exact")
    assert Counter.count == 0


class Registry(collections.OrderedDict):
    """Gives out an object of the class that it holds, as the activations of transformers do."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


def test_a_registry_that_makes_what_it_gives_out_is_left_as_it_was():
    registry = Registry(silu=nn.SiLU)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    step = stepgraph.capture(model, lambda m, b: registry["silu"](m(b)).square().mean(), x, passes="exact")
    assert step.verify(x).bitwise and list(dict.values(registry)) == [nn.SiLU]


def test_a_cache_is_left_without_fake_tensors():
    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n).triu()

    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    step = stepgraph.capture(model, lambda m, b: (m(b) * mask(len(b))).square().mean(), x, passes="exact")
    assert not mask.cache_info().currsize and step.verify(x).bitwise


@pytest.mark.parametrize(
    "held",
    [iter([1.0, 2.0]), itertools.count(), (i for i in range(3)), np.ones(1 << 20)],
    ids=["iterator", "count", "generator", "large array"],
)
def test_what_cannot_be_watched_is_refused_in_exact_and_told_of_in_default(held):
    def loss_fn(model, x):
        return model(x).square().mean() * (float(held[0]) if isinstance(held, np.ndarray) else next(held))

    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"the step reads loss_fn\.held, a"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, x, passes="exact")
    with pytest.warns(UserWarning, match=r"the step reads loss_fn\.held, a"):
        stepgraph.capture(nn.Linear(4, 4), loss_fn, x, passes=stepgraph.StepOptions(inductor="off"))


def test_a_value_that_changes_in_every_step_is_told_with_advice():
    model, x = Holder(1.0), torch.randn(3, 4)
    step = stepgraph.capture(model, plain_loss, x, passes="exact")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(6):
            model.held = np.float64(i + 2)
            assert torch.equal(step(x), plain_loss(model, x).detach())
    assert len(told) == 3 and "held has changed 3 times" in str(told[2].message)


# ---- kinds of change that no value shows ----


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


class Counted(type):
    @property
    def scale(cls):
        return cls.hidden


class Base:
    scale = 1.0


class Derived(Base):
    pass


class Other(Base):
    scale = 4.0


class Flag(threading.Event):
    @property
    def scale(self):
        return 2.0 if self.is_set() else 1.0


def reading(read, **held):
    """A model whose factor is ``read(model)``."""

    class Reading(Net):
        def value(self):
            return float(read(self))

    model = Reading()
    for name, value in held.items():
        setattr(model, name, value)
    return model


def weak_reference():
    held = Options(1.0)
    return reading(lambda m: m.at().scale, at=weakref.ref(held)), lambda: setattr(held, "scale", 2.0)


def weak_dictionary():
    held = Options(1.0)
    model = reading(lambda m: m.by_key["a"].scale, by_key=weakref.WeakValueDictionary(a=held))
    return model, lambda: setattr(held, "scale", 2.0)


def weak_keys():
    held = Described()
    return reading(lambda m: m.kept.scale, kept=held), lambda: setattr(held, "scale", 2.0)


def context_variable():
    variable = contextvars.ContextVar("variable", default=1.0)
    return reading(lambda m: variable.get()), lambda: variable.set(2.0)


def view_of_values():
    held = {"a": 1.0}
    return reading(lambda m: sum(m.view), view=held.values()), lambda: held.update(b=2.0)


def view_of_items():
    held = {"a": 1.0}
    return reading(lambda m: sum(v for _, v in m.view), view=held.items()), lambda: held.update(a=2.0)


def factory():
    held = collections.defaultdict(lambda: 1.0)
    model = reading(lambda m: m.kept.default_factory(), kept=held)
    return model, lambda: setattr(held, "default_factory", lambda: 2.0)


def attribute_of_an_enum():
    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.scale = 1.0
    return reading(lambda m: m.kind.scale, kind=Kind.ONE), lambda: setattr(Kind.ONE, "scale", 2.0)


def attribute_of_a_number():
    held = Number(1.0)
    held.scale = 1.0
    return reading(lambda m: m.number.scale, number=held), lambda: setattr(held, "scale", 2.0)


def object_of_c():
    model = reading(lambda m: m.get((1.0, 2.0)), get=operator.itemgetter(0))
    return model, lambda: setattr(model, "get", operator.itemgetter(1))


def method_of_c():
    held = [1.0]
    return reading(lambda m: m.get(0), get=held.__getitem__), lambda: held.__setitem__(0, 2.0)


def shadowed_in_a_class():
    class Own(Derived):
        pass

    return reading(lambda m: m.kept.scale, kept=Own()), lambda: setattr(Own, "scale", 3.0)


def class_of_an_object():
    held = Derived()
    return reading(lambda m: m.kept.scale, kept=held), lambda: setattr(held, "__class__", Other)


def class_of_the_model():
    model = reading(lambda m: 1.0)
    return model, lambda: setattr(model, "__class__", type("Own", (Net,), {"value": lambda self: 2.0}))


def bases_of_a_class():
    class Own(Derived):
        pass

    return reading(lambda m: m.kept.scale, kept=Own()), lambda: setattr(Own, "__bases__", (Other,))


def metaclass():
    Own = Counted("Own", (), {"hidden": 1.0})
    return reading(lambda m: Own.scale), lambda: setattr(Own, "hidden", 2.0)


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


def whole_environment():
    os.environ.pop("A_SCALE_OF_A_TEST", None)
    return reading(lambda m: float(dict(os.environ).get("A_SCALE_OF_A_TEST", 1))), environment()[1]


def environment():
    os.environ["A_SCALE_OF_A_TEST"] = "1"
    return reading(lambda m: os.getenv("A_SCALE_OF_A_TEST")), lambda: os.environ.update(A_SCALE_OF_A_TEST="2")


def event():
    held = Flag()
    return reading(lambda m: m.kept.scale, kept=held), held.set


def state_of_a_hook():
    held, model = Options(1.0), Net()
    model.linear.register_forward_hook(lambda module, args, y: y * held.scale)
    return model, lambda: setattr(held, "scale", 2.0)


def state_of_a_hook_of_every_module():
    held, model = Options(1.0), Net()
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * held.scale if m is model.linear else None)
    model.undo = hook.remove
    return model, lambda: setattr(held, "scale", 2.0)


def parameter_added():
    model = reading(lambda m: len(list(m.parameters())))
    return model, lambda: model.linear.register_parameter("more", nn.Parameter(torch.ones(1)))


def buffer_added():
    model = reading(lambda m: len(list(m.buffers())) + 1)
    return model, lambda: model.linear.register_buffer("more", torch.ones(1))


def submodule_of_a_leaf():
    model = reading(lambda m: len(list(m.modules())))
    return model, lambda: model.sub.add_module("more", nn.Identity())


def attribute_of_a_parameter():
    model = reading(lambda m: m.linear.weight.scale)
    model.linear.weight.scale = 1.0
    return model, lambda: setattr(model.linear.weight, "scale", 2.0)


def new_attribute_of_a_parameter():
    """``isinstance`` and ``get_parameter`` see a parameter in a trace too."""
    model = reading(
        lambda m: getattr(m.get_parameter("linear.weight"), "scale", 1.0) + isinstance(m.linear.weight, nn.Parameter)
    )
    return model, lambda: setattr(model.linear.weight, "scale", 2.0)


def attribute_of_a_tensor():
    held = torch.ones(2)
    held.scale = 1.0
    return reading(lambda m: held.scale), lambda: setattr(held, "scale", 2.0)


def value_of_a_tensor():
    held = torch.tensor(1.0)
    return reading(lambda m: held.item()), lambda: held.fill_(2.0)


def values_of_a_tensor():
    held = torch.ones(2)
    return reading(lambda m: held.tolist()[1]), lambda: held.fill_(2.0)


def default_dtype():
    model = reading(lambda m: torch.ones(1).element_size())
    model.undo = lambda: torch.set_default_dtype(torch.float32)
    return model, lambda: torch.set_default_dtype(torch.float64)


def mode_of_a_new_module():
    model = reading(lambda m: 1.0 + m.sub.training, sub=nn.Identity())
    model.sub = nn.Sequential(nn.Identity())

    def change():
        model.sub = nn.Identity()
        model.sub.eval()

    return model, change


def missing_of_a_namespace():
    held = types.SimpleNamespace()
    return reading(lambda m: getattr(held, "scale", 1.0)), lambda: setattr(held, "scale", 2.0)


class Single:
    scale = 1.0

    def __new__(cls):
        if not hasattr(cls, "only"):
            cls.only = super().__new__(cls)
            cls.only.scale = 1.0
        return cls.only


def object_made_in_the_trace():
    if hasattr(Single, "only"):
        del Single.only
    return reading(lambda m: Single().scale), lambda: setattr(Single(), "scale", 2.0)


def number_in_a_parameter_dict():
    held = nn.ParameterDict({"a": torch.ones(())})
    model = reading(lambda m: sum(float(v) for v in held.values() if isinstance(v, float)) + 1.0, held=held)
    return model, lambda: held.update({"b": 2.0})


def buffer_that_was_none():
    model = reading(lambda m: 1.0 if m.empty is None else 2.0)
    model.register_buffer("empty", None)
    return model, lambda: setattr(model, "empty", torch.ones(2))


def attribute_through_the_dict():
    model = reading(lambda m: m.__dict__.get("scale", 1.0))
    return model, lambda: setattr(model, "scale", 2.0)


UNSEEN = [
    buffer_that_was_none,
    attribute_through_the_dict,
    missing_of_a_namespace,
    object_made_in_the_trace,
    number_in_a_parameter_dict,
    weak_reference,
    weak_dictionary,
    weak_keys,
    context_variable,
    view_of_values,
    view_of_items,
    factory,
    attribute_of_an_enum,
    attribute_of_a_number,
    object_of_c,
    method_of_c,
    shadowed_in_a_class,
    class_of_an_object,
    class_of_the_model,
    bases_of_a_class,
    metaclass,
    forward_of_a_class,
    module_imported_in_forward,
    environment,
    whole_environment,
    event,
    state_of_a_hook,
    state_of_a_hook_of_every_module,
    parameter_added,
    buffer_added,
    submodule_of_a_leaf,
    attribute_of_a_parameter,
    attribute_of_a_tensor,
    new_attribute_of_a_parameter,
    value_of_a_tensor,
    values_of_a_tensor,
    default_dtype,
    mode_of_a_new_module,
]
#: What people do most; the others are for the long tests.
USUAL = [context_variable, state_of_a_hook, parameter_added, value_of_a_tensor, forward_of_a_class, whole_environment]
USUAL += [
    buffer_that_was_none,
    new_attribute_of_a_parameter,
    attribute_through_the_dict,
    missing_of_a_namespace,
    object_made_in_the_trace,
    number_in_a_parameter_dict,
]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in USUAL else pytest.mark.long) for k in UNSEEN])
def test_a_change_that_no_value_shows(kind):
    model, change = kind()
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
    with pytest.raises(CaptureError, match=r"test_watched.py:\d+\) draws numbers from the generator") as caught:
        stepgraph.capture(model, loss_fn, x, passes=stepgraph.StepOptions(inductor="off"))
    assert "\n" not in str(caught.value)


def test_an_array_of_objects_is_refused():
    held = np.array([Options(1.0)], dtype=object)
    with pytest.raises(CaptureError, match="ndarray of objects"):
        stepgraph.capture(reading(lambda m: m.kept[0].scale, kept=held), plain_loss, torch.randn(3, 4), passes="exact")

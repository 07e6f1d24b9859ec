"""Whatever forward and the loss read in Python is compared at each call: kinds of values x places x kinds of change."""

import array
import collections
import contextvars
import copy
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


class Stored:
    """A descriptor that keeps its value in the object's dictionary, by another name."""

    def __get__(self, owner, kind=None):
        return owner.__dict__.get("_scale", 1.0)

    def __set__(self, owner, value):
        owner.__dict__["_scale"] = value


class Describing:
    scale = Stored()


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


#: How a value for a step is made of a number.
MADE = {
    "numpy float": np.float32,
    "own number": Number,
    "dataclass": Record,
    "frozen dataclass": Frozen,
    "nested dataclass": lambda i: Record(Record(np.float64(i))),
    "namespace": lambda i: types.SimpleNamespace(scale=i),
    "slots": Slots,
    "object": Options,
    "property": Computed,
    "getattr": Mapped,
    "namedtuple": lambda i: Pair(i, [i]),
    "list of objects": lambda i: [Record(i)],
    "partial": lambda i: functools.partial(scaled, i),
    "bound method": lambda i: Called(i).__call__,
    "callable": Called,
    "module": Scaling,
    "tensor": torch.tensor,
    "list of tensors": lambda i: [torch.tensor(i)],
    "array": lambda i: np.full(3, i),
    "array of python": lambda i: array.array("d", [i]),
    "long list": lambda i: [i] * 1000,
    "nested dict": lambda i: {"a": {"b": [i]}},
    "ordered dict": lambda i: collections.OrderedDict(a=i),
    "defaultdict": lambda i: collections.defaultdict(float, a=i),
    "user dict": lambda i: collections.UserDict(a=i),
    "deque": lambda i: collections.deque([i], maxlen=4),
    "frozenset": lambda i: frozenset([i]),
    "closure": added,
}
#: A value for each of three steps.
KINDS = {name: tuple(map(make, (1.5, 2.5, 3.5))) for name, make in MADE.items()} | {
    "float": (1.5, 2.5, 3.5),
    "int and bool": (1, 2, True),
    "interpolated": tuple(np.interp(i, [0, 5], [1, 2]) for i in (0, 1, 2)),
    "numpy int": tuple(map(np.int64, (2, 3, 4))),
    "string": ("a", "bb", "ccc"),
    "enum": tuple(Level),
    "dtype": (torch.float16, torch.float32, torch.float64),
    "none": (0.5, 1.5, 0.25),
    "size": tuple(map(torch.Size, ([2], [3], [2, 2]))),
    "range": (range(2), range(3), range(4)),
    "bytes": (b"\1", b"\2", bytearray(b"\3")),
    "list": ([1.0], [2.0], [2.0, 3.0]),
    "nested list": ([[1.0], [2.0]], [[1.0], [3.0]], [[1.0, 3.0], []]),
    "tuple": ((1.0, 2.0), (1.0, 3.0), (1.0,)),
    "dict": ({"a": 1.0}, {"a": 2.0}, {"a": 2.0, "b": 3.0}),
    "set": ({1.0}, {2.0}, {2.0, 3.0}),
    "function": (torch.tanh, torch.sin, torch.cos),
    "lambda": (lambda x: x * 2, lambda x: x * 3, lambda x: x * 4),
}


class Net(nn.Module):
    """A linear layer and ``value()``, by which its result is multiplied."""

    held = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.sub, self.options = nn.Linear(4, 4), nn.Identity(), Options(None)
        self.several, self.by_name = [None], {"value": None}

    def value(self):
        return 1.0

    def forward(self, x):
        return used(self.value(), self.linear(x))


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


def of_model(read, put):
    """In a model: what its ``value`` reads, and how it is replaced there."""

    def make():
        model = type("Own", (Net,), {"value": read})()
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
    "attribute": of_model(lambda m: m.held, lambda m, value: setattr(m, "held", value)),
    "submodule": of_model(lambda m: m.sub.held, lambda m, value: setattr(m.sub, "held", value)),
    "nested": of_model(lambda m: m.options.scale, lambda m, value: setattr(m.options, "scale", value)),
    "element": of_model(lambda m: m.several[0], lambda m, value: m.several.__setitem__(0, value)),
    "item": of_model(lambda m: m.by_name["value"], lambda m, value: m.by_name.update(value=value)),
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


def to(name, value=2.0):
    """A change of an object: its attribute ``name`` gets ``value``."""
    return lambda held: setattr(held, name, value)


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
    "dataclass": (Record(1.0), [to("scale"), to("scale", np.float32(3))]),
    "dataclass in one": (Record(Record(1.0)), [lambda held: setattr(held.scale, "scale", 2.0)]),
    "namespace": (types.SimpleNamespace(scale=1.0), [to("scale")]),
    "slots": (Slots(1.0), [to("scale")]),
    "property": (Computed(1.0), [to("_scale")]),
    "getattr": (Mapped(1.0), [lambda held: held.options.update(scale=2.0)]),
    "callable": (Called(1.0), [to("factor")]),
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

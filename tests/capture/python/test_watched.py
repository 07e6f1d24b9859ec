"""Whatever forward and the loss read in Python is compared at each call: kinds of values x places x kinds of change."""

import array
import collections
import dataclasses
import enum
import functools
import itertools
import types
import typing
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

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


@pytest.mark.parametrize(("owner", "name", "other"), [(F, "gelu", F.silu), (torch, "tanh", torch.sin)])
def test_a_function_of_torch_that_is_replaced(owner, name, other, monkeypatch):
    loss_fn = lambda model, x: F.gelu(torch.tanh(model(x))).sum()  # noqa: E731
    check_follows(nn.Linear(4, 4), loss_fn, [lambda: None, lambda: monkeypatch.setattr(owner, name, other)])


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


class Subclass(torch.Tensor):
    table = {torch.ops.aten.erfinv.default: torch.ops.aten.digamma.default}


class MayDispatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        if isinstance(x, Subclass):
            return x.table[torch.ops.aten.erfinv.default](x).sum()
        return (x + self.weight.square()).sum()


def test_methods_of_tensors_are_torchs_after_a_trace_that_meets_their_class():
    """They stayed as they are during a trace: each tensor that was read was kept for good, and later traces hung."""
    before = dict(vars(torch.Tensor))
    model = MayDispatch()
    stepgraph.capture(model, lambda model, x: model(x), torch.ones(3), passes="exact")
    assert dict(vars(torch.Tensor)) == before


@pytest.mark.filterwarnings("error:.*captured again")
def test_operators_in_tables_are_compared_by_identity():
    """torch's operators note how they were dispatched."""
    model = MayDispatch()
    step = stepgraph.capture(model, lambda model, x: model(x), torch.ones(3), torch.optim.SGD(model.parameters(), 0.1))
    noted = torch.ops.aten.erfinv.default._dispatch_cache
    noted["by a test"] = None
    try:
        step(torch.ones(3))
    finally:
        del noted["by a test"]
    Subclass.table[torch.ops.aten.erfinv.default] = torch.ops.aten.lgamma.default
    with pytest.warns(UserWarning, match="captured again"):
        step(torch.ones(3))

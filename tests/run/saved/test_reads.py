"""What a trace reads is compared wherever it lies: in classes, decorators, slots, modules, files and another's copy."""

import copy
import cProfile
import importlib
import os
import re
import sys
import types

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.run.saved.reads.code import code_digest, imports
from stepgraph.run.saved.reads.describe import Describer
from stepgraph.run.saved.reads.layout import base_in_c
from stepgraph.run.saved.reads.patches import described_patches
from stepgraph.run.saved.reads.places import counted_module, counts

HEAD = """
import collections, contextlib, dataclasses, decimal, enum, functools, importlib, os, sys, threading, types
import numpy as np
import torch
V = float(os.environ["OF_THE_TEST"])

def scaled(k):
    def decorate(method):
        @functools.wraps(method)
        def inner(*args): return method(*args) * k
        return inner
    return decorate

class Plain(torch.nn.Module):
    held = None
    def __init__(self):
        super().__init__()
        self.linear, self.held = torch.nn.Linear(3, 3), self.hold()
    def hold(self): return None
    def factor(self): return 1.0
    def forward(self, x): return self.linear(x) * self.factor()

def loss_fn(model, batch): return model(batch).square().mean()
class Model(Plain):
    pass
"""
#: Each reads the number that its module has when it is imported.
READS = dict(
    re.findall(
        r"# (.*)\n([^#]*)",
        """
# a default
    def factor(self, v=V): return v
# a default by name
    def factor(self, *, v=V): return v
# a static method's default
    @staticmethod
    def factor(v=V): return v
# a decorator
    @scaled(V)
    def factor(self): return 1.0
# a property
    v = property(lambda self, v=V: v)
    def factor(self): return self.v
# a partial method
    def of(self, v): return v
    factor = functools.partialmethod(of, V)
# a list of the class
    S = [V]
    def factor(self): return self.S[0]
# an object of the class
    S = types.SimpleNamespace(v=V)
    def factor(self): return self.S.v
# a class made by a function
def make(v):
    class M(Plain):
        def factor(self): return v
    return M
Model = make(V)
# a metaclass
    def factor(self): return C.v
class M(type): v = V
class C(metaclass=M): pass
# a class in a class
    def factor(self): return C.D.v
class C:
    class D: v = V
# a function's attribute
    def factor(self): return of.v
def of(): pass
of.v = V
# slots
    def hold(self): return C(V)
    def factor(self): return self.held.v
@dataclasses.dataclass(slots=True)
class C:
    v: float
# a slot by a string
    def factor(self): return C.c.v
class C:
    __slots__ = 'v'
C.c = C()
C.c.v = V
# a private slot
    def hold(self): return C()
    def factor(self): return self.held.get()
class C:
    __slots__ = ('__v',)
    def __init__(self): self.__v = V
    def get(self): return self.__v
# slots and more
    def hold(self): return D(V)
    def factor(self): return self.held.v
class C:
    __slots__ = ('v',)
    def __init__(self, v): self.v = v
class D(C): pass
# a list of one's own
    def hold(self): return C([V])
    def factor(self): return self.held[0]
class C(list): pass
# a deque of one's own
    def hold(self): return C([V])
    def factor(self): return self.held[0]
class C(collections.deque): pass
# an array of one's own
    def hold(self): return np.array([V]).view(C)
    def factor(self): return float(self.held[0])
class C(np.ndarray): pass
# a decimal of one's own
    def hold(self): return C(V)
    def factor(self): return float(self.held)
class C(decimal.Decimal): pass
# a number with a name
    def hold(self): return C(V)
    def factor(self): return int(self.held)
class C(int):
    def __repr__(self): return 'C'
# a string that holds
    def hold(self):
        s = C('s')
        s.v = V
        return s
    def factor(self): return self.held.v
class C(str): pass
# an enum's value
    def factor(self): return C.A.value
class C(enum.Enum): A = V
# a default dictionary
    def hold(self):
        v = V
        return collections.defaultdict(lambda: v)
    def factor(self): return self.held['a']
# a method of a dictionary
    def factor(self): return GET('a')
GET = {'a': V}.get
# a function of NumPy
    def factor(self): return float(F([1.0, 3.0]))
F = np.sum if V == 1 else np.mean
# a module in the model
    def hold(self): return importlib.import_module('of_the_user_too')
    def factor(self): return self.held.v
# a module in a module
    def factor(self): return U.inside.v
import of_the_user_too as U
U.inside = types.ModuleType('inside')
U.inside.v = V
# an import inside
    def factor(self):
        from of_the_user_too import v
        return v
import of_the_user_too
# a global by its name
    def factor(self): return globals()['V']
# code that exec ran
    def factor(self): return NS['f']()
NS = {'v': V}
exec('def f(): return v', NS)
# a module without a name
    def factor(self): return M.get()
spec = importlib.util.spec_from_file_location('m', os.environ['OF_THE_TEST_FILE'])
M = importlib.util.module_from_spec(spec)
spec.loader.exec_module(M)
# a function with a cache
    def factor(self): return of()
@functools.cache
def of(): return float(os.environ['OF_THE_TEST'])
of()
# a file
    def factor(self): return float(open(os.environ['OF_THE_TEST_FILE'] + '.txt').read())
# equal code of another file
    def factor(self): return A.get() * B.get()
import of_the_user_too as A, of_the_user_as_well as B
""",
    )
)
OTHER = "import os\nv = float(os.environ['OF_THE_TEST'])\ndef get(): return v\n"
OF_THE_USER = ("of_the_user", "of_the_user_too", "of_the_user_as_well")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a program whose file is given anew, as another process would, and compares its step with eager."""

    def start(text, value, folder="one"):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "of_the_user.py").write_text(text)
        (path / "of_the_user_too.py").write_text(OTHER)
        (path / "of_the_user_as_well.py").write_text(OTHER.replace("float(os.environ['OF_THE_TEST'])", "1.0"))
        (path / "of_the_user_too.py.txt").write_text(value)
        monkeypatch.setenv("OF_THE_TEST", value)
        monkeypatch.setenv("OF_THE_TEST_FILE", str(path / "of_the_user_too.py"))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(path), *sys.path])
            patch.setattr(sys, "dont_write_bytecode", True)
            for name in OF_THE_USER:
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            return _started(importlib.import_module("of_the_user"), tmp_path / "steps")

    yield start
    for name in OF_THE_USER:
        sys.modules.pop(name, None)


def _started(module, folder):
    torch.manual_seed(0)
    model = module.Model()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)
    step = stepgraph.capture(model, module.loss_fn, batch, optimizer, passes="exact", saved=folder)
    reference = module.loss_fn(copy.copy(model), batch).detach()
    assert torch.equal(step(batch), reference), step.saved
    return step.saved


#: No text stands for these: they are captured at every start.
NO_TEXT = ("a function with a cache",)


@pytest.mark.parametrize("what", READS)
def test_what_is_read_is_compared(what, start):
    assert start(HEAD + READS[what], "1.0").loaded is None
    again = start(HEAD + READS[what], "1.0")
    assert again.loaded == ("graph" if what in NO_TEXT else "start"), again
    assert start(HEAD + READS[what], "2.0").loaded is None


def test_another_copy_of_a_program_is_looked_at_itself(start):
    """Two checkouts share one cache; what differs may be read by no name of the first."""
    text = HEAD + "    def factor(self):\n        from of_the_user import inside\n        return inside()\n"
    first, other = ("def inside(): return 1.0", "def inside(): return 2.0")
    assert start(text + first, "1.0", "one").loaded is None
    assert start(text + first, "1.0", "same").loaded == "start"
    assert start(text + other, "1.0", "other").loaded is None


def test_what_a_trace_writes_is_compared_as_it_was_before(start):
    text = HEAD + "    def factor(self): return SEEN.setdefault('a', 1.0)\nSEEN = {}"
    assert [start(text, "1.0").loaded for _ in range(3)] == [None, "graph", "start"]


def test_what_no_step_calls_may_have_no_text(start):
    text = (
        HEAD
        + "    def other(self, v=(i for i in ())): return v\n    lock = threading.Lock()\n    file = open(os.devnull)"
    )
    assert [start(text, "1.0").loaded for _ in range(2)] == [None, "start"]
    read = text + "\n    def factor(self): return 1.0 if self.file else 2.0"
    assert "nothing stands for model.file, a _io.TextIOWrapper" in start(read, "1.0").notes[-1]


PATCHES = {
    "a built-in": lambda: torch.tanh,
    "another of torch's own": lambda: nn.functional.relu,
    "a partial": lambda: __import__("functools").partial(nn.functional.gelu, approximate="tanh"),
    "code of no file": lambda: eval("lambda x: x * 2", {}),
    "an object": lambda: Called(),
}


class Called:
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize("what", PATCHES)
def test_what_is_in_the_place_of_a_function_of_torch_is_compared(what, monkeypatch):
    before = described_patches({})
    monkeypatch.setattr(nn.functional, "silu", PATCHES[what]())
    assert described_patches({}) != before
    monkeypatch.undo()
    assert described_patches({}) == before


def test_packages_of_another_python_count():
    """A virtual environment that sees the packages of the Python that it was made by has them inside that Python."""
    inside = os.path.join(os.path.dirname(os.__file__), "site-packages", "of_the_user.py")
    assert counts(inside) and counts("/program/model.py")
    assert not counts(os.__file__) and not counts(torch.__file__) and not counts(stepgraph.__file__)


def test_modules_without_a_file():
    assert counted_module(types.ModuleType("made")) and not counted_module(sys) and not counted_module(torch.ops.aten)


def test_texts_do_not_depend_on_the_order_of_a_set():
    """Its order is that of hashes, another in every process; what comes after it is numbered all the same."""

    class Hashed:
        def __init__(self, place):
            self.place = place

        def __hash__(self):
            return self.place

    def text(*places):
        ones = [Hashed(place) for place in places]
        for one, other in zip(ones, "ab", strict=True):
            vars(one).update(name=other, place=0)
        return Describer()([set(ones), ones[0]], "a set")

    orders = (0, 1), (1, 0)
    assert text(*orders[0]) == text(*orders[1])


def test_what_a_class_in_c_holds_is_known():
    class Numbers(list):
        pass

    class Slots:
        __slots__ = ("a",)

    assert [base_in_c(kind) for kind in (Numbers, Slots, nn.Linear)] == [list, object, object]


def test_conjugates_have_a_form_of_their_own():
    value = torch.ones(2, dtype=torch.complex64)
    assert Describer()(value.conj(), "a batch") != Describer()(value, "a batch")


def test_code_that_takes_other_arguments_is_other_code():
    def one(a, b):
        return a

    def other(a, *, b):
        return a

    assert code_digest(one.__code__) != code_digest(other.__code__)


def test_imports_are_found():
    def function():
        import os.path
        from collections import abc

        return os.path, abc

    assert set(imports(function.__code__, {})) == {"os", "os.path", "collections"}


def test_hooks_of_what_autograd_keeps_have_no_text(tmp_path):
    model = nn.Linear(3, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        step = stepgraph.capture(model, lambda m, x: m(x).sum(), torch.ones(2, 3), passes="exact", saved=tmp_path)
    assert "the mode around the capture (torch.autograd.graph.saved_tensors_hooks)" in step.saved.notes[0]


def test_a_profiler_that_is_on_stays_on(tmp_path):
    """cProfile's is an object in C, which `sys.setprofile` does not take back."""
    profiler, model = cProfile.Profile(), nn.Linear(4, 4)
    profiler.enable()
    try:
        stepgraph.capture(model, lambda m, b: m(b).sum(), torch.ones(2, 4), passes="exact", saved=tmp_path)
        "on".upper()
    finally:
        profiler.disable()
    assert any("method 'upper'" in entry.code for entry in profiler.getstats() if isinstance(entry.code, str))

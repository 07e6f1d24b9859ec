"""The numbers that an optimizer's ``step`` computes in Python, recorded so that each step computes them again.

A learning rate, a count of steps and what follows from them (``lr / (1 - beta1**step)``) are numbers of the host. While
``step`` is traced they are `Float` and `Int`: Python's numbers, which also write each operation on a `Tape`. A call of
the captured step reads the live values, runs the tape in Python's own arithmetic, and hands the results to the graph.
A comparison gives Python's answer and is a *decision* on the tape: a graph holds for the steps with the same decisions.

torch takes them where it takes numbers, and cannot take their value in secret: it asks the node of a ``SymFloat`` or
``SymInt`` for it, which is on the tape as well.
"""

import builtins
import contextlib
import copy
import hashlib
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from stepgraph import compat
from stepgraph.capture.python.values import equal
from stepgraph.capture.recorder import is_user_file
from stepgraph.errors import CaptureError


@dataclass(frozen=True)
class Ref:
    """The place of a value on a tape."""

    place: int


@dataclass
class Entry:
    """One line of a tape. ``function``: what computes it from ``args``, in which a `Ref` is an earlier line; None for a
    live value that is read. ``key``: equal for lines that compute the same from the same values. ``counts``: the live
    values that it depends on. ``expected``: of a decision, its outcome; ``exact``: it needs this very value.
    ``line``: ``file:line`` in the code of the optimizer."""

    function: Callable | None
    args: tuple
    key: str
    value: Any
    leaves: frozenset[int]
    expected: Any = None
    is_decision: bool = False
    exact: bool = False
    line: str = ""


@dataclass
class Tape:
    """What one trace of ``step`` computed on the host. ``readers``: what gives each live value, by its place."""

    entries: list[Entry] = field(default_factory=list)
    readers: dict[int, Callable[[], Any]] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _decided: set[int] = field(default_factory=set)

    def read(self, name: str, value: Any, reader: Callable[[], Any]) -> int:
        """The place of a live value, by its ``name``."""
        if name not in self._places:
            self._places[name] = place = len(self.entries)
            self.readers[place] = reader
            self.entries.append(Entry(None, (), name, value, frozenset((place,))))
        return self._places[name]

    def computed(self, function: Callable, args: tuple, value: Any) -> int:
        """The tape position of ``function(*args)``."""
        key = f"{_name(function)}({','.join(map(self._key, args))})"
        key = key if len(key) < 200 else f"{_name(function)}#{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        if key not in self._places:
            self._places[key] = len(self.entries)
            self.entries.append(Entry(function, args, key, value, self.leaves_of(args)))
        return self._places[key]

    def decide(self, place: int, outcome: Any, exact: bool = False) -> None:
        """Python goes by a value."""
        found = self.entries[place]
        if found.leaves and place not in self._decided:
            self._decided.add(place)
            line = line_in_use()
            entry = Entry(None, (Ref(place),), f"?{found.key}", None, found.leaves, outcome, True, exact, line)
            self.entries.append(entry)

    def leaves_of(self, args: Any) -> frozenset[int]:
        """The live values that ``args`` depend on."""
        found = [self.entries[leaf.place].leaves for leaf in compat.pytree.tree_leaves(args) if isinstance(leaf, Ref)]
        return frozenset().union(*found)

    def _key(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.entries[value.place].key
        if isinstance(value, list | tuple):
            return f"[{','.join(map(self._key, value))}]"
        return f"{type(value).__name__}:{value!r}"

    def run(self) -> list[Any] | None:
        """The values of all lines for the current live values; None if a decision differs."""
        values: list[Any] = []
        for place, entry in enumerate(self.entries):
            if entry.is_decision:
                if not equal(values[entry.args[0].place], entry.expected):
                    return None
                values.append(None)
            elif entry.function is None:
                values.append(self.readers[place]())
            else:
                try:
                    values.append(entry.function(*_filled(entry.args, values)))
                except (ArithmeticError, ValueError):  # eager goes by a decision before it comes here
                    return None
        return values


def _filled(args: Any, values: list[Any]) -> Any:
    return tuple(
        values[arg.place] if type(arg) is Ref else _filled(arg, values) if type(arg) is tuple else arg for arg in args
    )


def _name(function: Callable) -> str:
    return getattr(function, "name", None) or f"{function.__module__}.{function.__qualname__}"


def line_in_use() -> str:
    """``file:line`` of the optimizer's code that runs: a user's, else the innermost of ``torch.optim``."""
    frame, found = sys._getframe(1), ""
    while frame is not None and not (frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith(_CALLER)):
        name = frame.f_code.co_filename
        if is_user_file(name):
            return f"{name}:{frame.f_lineno}"
        if not found and TORCHS in name:
            found = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return found


#: The file that calls ``step``, and the folder of torch's optimizers.
_CALLER, TORCHS = os.path.join("optimizer", "own_run.py"), os.path.join("torch", "optim", "")


class Constant:
    """A function that gives a value that ``step`` wrote."""

    def __init__(self, value: Any):
        shown = (value.dtype, value.item()) if isinstance(value, torch.Tensor) else value  # a tensor's text is rounded
        self.value, self.name = value, f"{type(value).__name__}:{shown!r}"

    def __call__(self) -> Any:
        return copy.deepcopy(self.value)


class _Node:
    """What torch asks of a symbolic number."""

    def __init__(self, number: "Float | Int"):
        self.number = number

    def is_int(self) -> bool:
        return isinstance(self.number, Int)

    def is_float(self) -> bool:
        return isinstance(self.number, Float)

    def _no(self) -> bool:
        return False

    def _yes(self) -> bool:
        return True

    is_bool = is_constant = is_nested_int = _no
    is_symbolic = has_hint = _yes

    def guard_float(self, file: str, line: int) -> float:
        return float(self.number.known())

    def guard_int(self, file: str, line: int) -> int:
        return int(self.number.known())

    def wrap_int(self, other: int) -> NoReturn:  # to compare with it, as where it indexes a tensor
        raise CaptureError(
            f"the optimizer's step ({line_in_use()}) uses a count as a plain number, such as an index, which would be "
            "a constant of the graph; compute with it by Python's operators and math, or keep it in a tensor"
        )

    wrap_float = wrap_bool = wrap_int

    def constant_int(self) -> None:
        return None

    constant_bool = maybe_as_int = maybe_as_float = maybe_as_bool = nested_int = constant_int

    def str(self) -> str:
        return repr(self.number.value)

    _graph_repr = str


class _Number:
    """A number on a tape. ``value``: what it is while ``step`` is traced."""

    tape: Tape
    place: int
    value: Any

    def __init__(self, tape: Tape, place: int):
        super().__init__(_Node(self))
        self.tape, self.place, self.value = tape, place, tape.entries[place].value

    def known(self) -> Any:
        """The value, which Python or torch goes by."""
        self.tape.decide(self.place, self.value, exact=True)
        return self.value

    def __float__(self) -> float:
        return float(self.known())

    def __int__(self) -> int:
        return int(self.known())

    def __index__(self) -> int:
        return operator.index(self.known())

    def __bool__(self) -> bool:
        return apply(operator.truth, self)

    def __hash__(self) -> int:
        return hash(self.known())

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return format(self.value, form)


class Float(_Number, torch.SymFloat):
    """A float on a tape."""


class Int(_Number, torch.SymInt):
    """An int on a tape."""


def apply(function: Callable, *args: Any) -> Any:
    """``function(*args)``, on the tape of the numbers among ``args``. A truth value is a decision."""
    tape = next(arg.tape for arg in args if isinstance(arg, _Number))
    value = function(*(arg.value if isinstance(arg, _Number) else arg for arg in args))
    place = tape.computed(function, tuple(Ref(a.place) if isinstance(a, _Number) else a for a in args), value)
    if type(value) is bool:
        tape.decide(place, value)
    return wrapped(tape, place)


def wrapped(tape: Tape, place: int) -> Any:
    """What is at ``place``, as ``step`` handles it."""
    value = tape.entries[place].value
    if type(value) is float:
        return Float(tape, place)
    return Int(tape, place) if type(value) is int else value


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number of a tape; torch may have wrapped it again."""
    return isinstance(value, torch.SymFloat | torch.SymInt) and type(value.node) is _Node


_PLAIN = (int, float, bool, torch.SymInt, torch.SymFloat)


def _operation(function: Callable, reverse: bool = False) -> Callable:
    def method(self: _Number, *others: Any) -> Any:
        if not all(isinstance(other, _PLAIN) or other is None for other in others):
            return NotImplemented
        return apply(function, *((*others, self) if reverse else (self, *others)))

    return method


for _word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _function = builtins.pow if _word == "pow" else getattr(operator, f"__{_word}__")
    for _class in (Float, Int):
        setattr(_class, f"__{_word}__", _operation(_function))
        setattr(_class, f"__r{_word}__", _operation(_function, reverse=True))
for _word in ("neg", "pos", "abs", "invert"):
    for _class in (Float, Int):
        setattr(_class, f"__{_word}__", _operation(getattr(operator, f"__{_word}__")))
for _word in ("trunc", "floor", "ceil"):
    for _class in (Float, Int):
        setattr(_class, f"__{_word}__", _operation(getattr(math, _word)))
for _class in (Float, Int):
    _class.__round__ = _operation(builtins.round)
    _class.__divmod__ = lambda self, other: (self // other, self % other)
    _class.is_integer = _operation(float.is_integer)
    _class.conjugate = _class.__pos__
for _word in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _class in (Float, Int):
        setattr(_class, f"__{_word}__", _operation(getattr(operator, f"__{_word}__")))

_MATH = {name: function for name, function in vars(math).items() if callable(function)}


def _on_tape(function: Callable) -> Callable:
    def call(*args: Any, **options: Any) -> Any:
        if options or not any(isinstance(arg, _Number) for arg in args):
            return function(*args, **options)
        return apply(function, *args)

    return call


@contextlib.contextmanager
def python_on_tape(modules: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the functions of ``math`` accept numbers of a tape, under ``math`` and where one of ``modules`` (name ->
    module, the ones that define an optimizer) has imported them by name."""
    ours = {name: _on_tape(function) for name, function in _MATH.items()}
    by_id = {id(function): ours[name] for name, function in _MATH.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.replaced(math, **ours))
        for module in modules.values():
            names = {name: by_id[id(v)] for name, v in vars(module).items() if id(v) in by_id and module is not math}
            stack.enter_context(compat.replaced(module, **names))
        yield

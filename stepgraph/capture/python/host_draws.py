"""Random numbers of the host that enter a step only as tensors, such as the masks that SpecAugment draws by NumPy.

A trace records the calls that draw, and what NumPy and Python compute from their results. The host makes the same calls
again before each step, once for each microbatch and in the same order, so that its generators draw the same numbers as
in eager; the tensors made from the results are additional inputs of the graph. A function of a Python module that draws
and that is called without tensors of unknown value is one such call, whatever it decides inside.
"""

import contextlib
import functools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from stepgraph import compat
from stepgraph.capture.batch_reads import BatchReads
from stepgraph.capture.python.host_random import HostRandom
from stepgraph.capture.python.values import BEHIND, elements, fake_inside, kind_of
from stepgraph.errors import CaptureError

Tensor = torch.Tensor
#: Functions of the generators that draw nothing.
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator")
_MAKERS = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "asarray", "from_numpy")}
#: Methods of arrays that write nothing.
_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "copy", "cumprod", "cumsum", "diagonal", "dot"),
    *("flatten", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std"),
    *("sum", "swapaxes", "take", "transpose", "var", "view"),
)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_COMPARED = ("lt", "le", "eq", "ne", "gt", "ge")


class Hosted(NamedTuple):
    """A function that draws, under a ``name`` in the globals of a module."""

    module: dict[str, Any]
    name: str
    function: types.FunctionType


class DrawsFound(Exception):
    """The trace is to be begun again: ``hosted`` are functions that draw; None: no draw is recorded."""

    def __init__(self, hosted: tuple[Hosted, ...] | None):
        super().__init__()
        self.hosted = hosted


class _Place(int):
    """The number of an earlier call."""


class _Known(int):
    """The number of a tensor that follows from the batch's integers."""


@dataclass(frozen=True)
class _Leaf:
    place: int
    device: torch.device


@dataclass
class Draws:
    """What the host computes before a step: ``calls``, functions with their arguments and the form of what they give,
    and the ``leaves`` of them that the graph reads after the batch's. ``known``: nodes of the batch that they read."""

    calls: list[tuple[Callable, Any, Any, Any]] = field(default_factory=list)
    leaves: list[_Leaf] = field(default_factory=list)
    known: list[fx.Node] = field(default_factory=list)

    def run(self, leaves: Sequence[Any], reads: BatchReads, microbatches: int) -> list[Tensor]:
        """For each leaf a tensor whose rows are those of the microbatches."""
        if not self.calls:
            return []
        made: list[list[Tensor]] = []
        with compat.without_modes(), torch.no_grad():
            for k in range(microbatches):
                known, results = reads.values(self.known, leaves, k, microbatches), []

                def read(value: Any, results: list = results, known: list = known) -> Any:
                    if type(value) in (_Place, _Known):
                        return (results if type(value) is _Place else known)[value]
                    return _copied(value)

                for function, args, kwargs, form in self.calls:
                    given = _mapped((args, kwargs), read)
                    results.append(function(*given[0], **given[1]))
                    _check(form, _form(results[-1]))
                made.append([results[leaf.place] for leaf in self.leaves])
            rows = [torch.stack(parts) for parts in zip(*made, strict=True)]
        return [row.to(leaf.device, non_blocking=True) for row, leaf in zip(rows, self.leaves, strict=True)]


def _form(result: Any) -> tuple:
    if isinstance(result, Tensor | np.ndarray):
        return type(result).__name__, tuple(result.shape), result.dtype
    return type(result).__name__, len(result) if type(result) in (tuple, list) else 1


def _check(captured: tuple, now: tuple) -> None:
    if captured != now:
        raise CaptureError(
            f"forward draws {' '.join(map(str, now))} on the host, and drew {' '.join(map(str, captured))} when it was "
            "captured, whose shapes are fixed: draw equally many numbers in every step, or pass them in the batch"
        )


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """What ``leaf`` gives for each value in the lists, tuples and dicts of ``value``."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return {key: _mapped(item, leaf) for key, item in value.items()} if type(value) is dict else leaf(value)


def _copied(value: Any) -> Any:
    """An array as a copy, which a call may change."""
    return value.copy() if isinstance(value, np.ndarray) else value


class Recording:
    """The draws of one trace. ``hosted``: one call each; ``before``: the generators' states; ``known``: the trace's
    `KnownValues`; ``add_leaf``: gives the trace one more input; ``refuses``: whether draws are refused now."""

    def __init__(
        self,
        hosted: Sequence[Hosted],
        before: HostRandom,
        known: Any,
        add_leaf: Callable[[Tensor, torch.device], Tensor],
        refuses: Callable[[], bool],
    ) -> None:
        self.draws, self.found, self.failed = Draws(), [], False
        self._hosted, self._random, self._known, self._add_leaf = hosted, before, known, add_leaf
        self._refuses = refuses
        self._inside, self._thread, self._shared = False, threading.get_ident(), False
        self._outer = sys._getframe(1)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, draws and tensors made of them are recorded."""
        first = self._random.kept()
        put = {(id(one.module), one.name): one for one in self._hosted}.values()
        try:
            with contextlib.ExitStack() as stack:
                for module in (np.random, random):
                    stack.enter_context(compat.replaced(module, **{n: self._drawing(f) for n, f in _drawers(module)}))
                makers = {name: self._making(name, getattr(torch, name)) for name in _MAKERS}
                stack.enter_context(compat.replaced_functions(torch, **makers))
                for one in put:
                    one.module[one.name] = self._one_call(one.function)
                    stack.callback(one.module.__setitem__, one.name, one.function)
                yield
        finally:
            moved = self._random.moved()
            if self.draws.calls or moved:
                self._random.put(first)
        if self.found and not self.failed:
            raise DrawsFound((*self._hosted, *self.found))
        if self.failed or moved:
            raise DrawsFound(None)

    def _passes(self) -> bool:
        return self._inside or threading.get_ident() != self._thread

    def _drawing(self, draw: Callable) -> Callable:
        """``draw``, a function of a generator."""

        @functools.wraps(draw)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if self._passes():
                return draw(*args, **kwargs)
            outer = self._function_around(sys._getframe(1))
            if outer:
                self.found += [one for one in outer if one not in self.found]
                return draw(*args, **kwargs)
            return self.call(draw, *args, **kwargs)

        vars(drawn)[BEHIND] = draw
        return drawn

    def _one_call(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._passes() or not self._is_plain((args, kwargs)):
                return function(*args, **kwargs)
            return self.call(function, *args, **kwargs)

        vars(called)[BEHIND] = function
        return called

    def _making(self, name: str, make: Callable) -> Callable:
        """``make``, a torch function that makes a tensor of its argument."""

        @functools.wraps(make)
        def made(data: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._passes() or not any(type(leaf) is Drawn for leaf in compat.pytree.tree_leaves(data)):
                return make(data, *args, **kwargs) if data is not None else make(*args, **kwargs)
            if kwargs.pop("requires_grad", False):
                self.refuse()
            self._shared |= name != "tensor"
            device = kwargs.pop("device", None)
            return self._called(_MAKERS[name], (data, *args), kwargs, device)

        vars(made)[BEHIND] = make
        return made

    def _function_around(self, frame: Any) -> list[Hosted]:
        """The outermost function of a module in which ``frame`` draws and whose arguments are plain or known."""
        chosen: list[Hosted] = []
        while frame is not None and frame.f_back is not None and frame is not self._outer:
            code, caller = frame.f_code, frame.f_back
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bin(code.co_flags & 12).count("1")]
            places = [
                Hosted(held, name, value)
                for held in (caller.f_globals, frame.f_globals)
                for name, value in held.items()
                if type(value) is types.FunctionType and value.__code__ is code and not value.__closure__
            ]
            known = {id(one.function) for one in self._hosted}
            if (
                places
                and id(places[0].function) not in known
                and self._is_plain([frame.f_locals.get(n) for n in names])
            ):
                chosen = places
            frame = caller
        return chosen

    def _is_plain(self, value: Any) -> bool:
        """Whether arguments are plain values, arrays, and tensors of known value."""
        kind = kind_of(type(value))
        if type(value) is Drawn or kind in ("atom", "buffer", "function", "class"):
            return True
        if isinstance(value, Tensor):
            return self._known.knows_of_batch(value)
        if kind == "container":
            return all(map(self._is_plain, elements(value)))
        return kind == "instance" and not fake_inside(value)

    # ---- what is recorded ----

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` gives now, and will give before each step."""
        return self._called(function, args, kwargs)

    def _called(self, function: Callable, args: tuple, kwargs: dict[str, Any], device: Any = None) -> Any:
        if self._refuses() or self._random.moved() or not self._is_plain((args, kwargs)):
            self.refuse()
        given = _mapped((args, kwargs), self._now)
        generator = torch.get_rng_state()
        self._inside = True
        try:
            with compat.without_modes(), torch.no_grad():
                result = function(*given[0], **given[1])
        finally:
            self._inside = False
        if not torch.equal(generator, torch.get_rng_state()):  # eager draws it after what forward drew before
            torch.set_rng_state(generator)
            self.refuse()
        self._random.accept()
        self.draws.calls.append((function, *_mapped((args, kwargs), self._recorded), _form(result)))
        return self._wrapped(_Place(len(self.draws.calls) - 1), result, device)

    def _wrapped(self, place: _Place, result: Any, device: Any = None) -> Any:
        if isinstance(result, Tensor):
            if compat.is_fake(result) or not result.is_contiguous() or result.device.type != "cpu":
                self.refuse()
            home = torch.device(device or "cpu")
            self.draws.leaves.append(_Leaf(place, home))
            return self._add_leaf(result, home)
        if type(result) in (tuple, list):
            return type(result)(self.call(operator.getitem, Drawn(self, place, result), i) for i in range(len(result)))
        if isinstance(result, np.ndarray | np.generic | bool | int | float | complex):
            return Drawn(self, place, result)
        return self.refuse()

    def change(self, function: Callable, drawn: "Drawn", *args: Any) -> Any:
        """A call that writes into ``drawn``: not where a tensor may share its memory."""
        return self.refuse() if self._shared else self.call(function, drawn, *args)

    def _now(self, value: Any) -> Any:
        if type(value) is Drawn:
            return object.__getattribute__(value, "_now")
        return self._known.value_of(value) if isinstance(value, Tensor) else value

    def _recorded(self, value: Any) -> Any:
        if type(value) is Drawn:
            return object.__getattribute__(value, "_place")
        if isinstance(value, Tensor):
            self.draws.known.append(self._known.kept_for_host(value))
            return _Known(len(self.draws.known) - 1)
        return _copied(value)

    def refuse(self) -> Any:
        """What is drawn does more than to enter as a tensor: the trace is to be begun again without recording."""
        self.failed = True
        raise DrawsFound(None)


class Drawn:
    """What an array or number of the host is during a trace: it computes, and shows its form but no value."""

    def __init__(self, recording: Recording, place: _Place, now: Any) -> None:
        self._recording, self._place, self._now = recording, place, now

    @property
    def __class__(self) -> type:
        return type(self._now)

    shape = property(lambda self: np.shape(self._now))
    ndim = property(lambda self: np.ndim(self._now))
    size = property(lambda self: np.size(self._now))
    dtype = property(lambda self: self._now.dtype)
    T = property(lambda self: self._recording.call(np.transpose, self))
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self._now))])

    def __getitem__(self, index: Any) -> Any:
        return self._recording.call(operator.getitem, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._recording.change(_set_item, self, index, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs or method == "at":
            return self._recording.refuse()
        return self._recording.call(getattr(ufunc, method), *inputs, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._recording.refuse() if "out" in kwargs else self._recording.call(function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            return self._recording.refuse()
        return functools.partial(self._recording.call, _method, self, name)

    def _value(self, *_: Any) -> Any:
        return self._recording.refuse()

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __contains__ = __array__ = __str__ = __format__ = _value


def _method(array: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(array, name)(*args, **kwargs)


def _set_item(array: Any, index: Any, value: Any) -> Any:
    array[index] = value
    return array


def _operator(name: str, swapped: bool = False) -> Callable:
    function = getattr(operator, name)

    def compute(self: Drawn, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self._recording.refuse()
        return self._recording.call(function, *((other, self) if swapped else (self, other)))

    return compute


def _unary(self: Drawn, function: Callable) -> Any:
    return self._recording.call(function, self)


def _in_place(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda self, other: self._recording.change(function, self, other)


for _name in _BINARY:
    _bare = _name.rstrip("_")
    setattr(Drawn, f"__{_bare}__", _operator(_name))
    setattr(Drawn, f"__r{_bare}__", _operator(_name, swapped=True))
    setattr(Drawn, f"__i{_bare}__", _in_place(f"i{_bare}"))
for _name in _COMPARED:
    setattr(Drawn, f"__{_name}__", _operator(_name))
for _name in ("neg", "pos", "invert", "abs"):
    setattr(Drawn, f"__{_name}__", functools.partialmethod(_unary, getattr(operator, _name)))


def _drawers(module: Any) -> list[tuple[str, Callable]]:
    """The functions of a module that draw from its global generator."""
    kinds, owners = (types.BuiltinMethodType, types.MethodType), (random.Random, np.random.RandomState)
    found = [(name, f) for name, f in vars(module).items() if isinstance(f, kinds) and name not in _NO_DRAWS]
    return [(name, f) for name, f in found if isinstance(f.__self__, owners)]

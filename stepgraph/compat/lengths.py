"""Symbolic sizes: sizes that a trace or a compiler keeps open, and what it assumed of them."""

import contextlib
import functools
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    has_symbolic_sizes_strides,
)
from torch.utils._sympy.functions import ToFloat

from stepgraph.compat.replaced import replaced
from stepgraph.compat.versions import TORCH


class SymbolicSizes:
    """Sizes of at least 2 that are open. ``symbols``: a ``torch.SymInt`` for each of the ``hints``, which is its value
    where one is needed. ``mode``: the fake mode whose tensors may have them as sizes; without one, a new one."""

    def __init__(self, hints: Sequence[int], mode: FakeTensorMode | None = None):
        from torch._dynamo.source import ConstantSource  # imports Dynamo and Inductor, which takes seconds

        self.mode = FakeTensorMode(shape_env=ShapeEnv()) if mode is None else mode
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        self.symbols = [
            self.mode.from_tensor(
                torch.empty(hint), static_shapes=False, source=ConstantSource(f"size_{i}"), symbolic_context=context
            ).shape[0]
            for i, hint in enumerate(hints)
        ]
        self._expressions = [symbol.node.expr for symbol in self.symbols]

    def broken(self, sizes: Sequence[int]) -> str:
        """The first assumption so far that does not hold for these ``sizes``, as text; "" if all hold."""
        known = self._known(sizes)
        if min(sizes) < 2:
            return "size > 1"
        guards = [guard.expr for guard in self.mode.shape_env.guards]
        expr = next((expr for expr in guards if not bool(expr.xreplace(known) == True)), None)  # noqa: E712
        names = {known: sympy.Symbol(f"size{i}") for i, known in enumerate(known)}
        return "" if expr is None else str(expr.xreplace(names))

    def at(self, value: Any, sizes: Sequence[int]) -> Any:
        """An open ``value`` at these ``sizes``; any other value is returned as it is. RuntimeError if floating-point
        numbers lead to it, because sympy adds and multiplies them in another order than Python."""
        if not isinstance(value, torch.SymInt):
            return value
        if _rounds(value.node.expr):
            raise RuntimeError("a size follows from floating-point numbers")
        return int(value.node.expr.xreplace(self._known(sizes)))

    @property
    def rounds(self) -> bool:
        """Whether what was assumed so far compares floating-point numbers."""
        return any(_rounds(guard.expr) for guard in self.mode.shape_env.guards)

    def _known(self, sizes: Sequence[int]) -> dict[sympy.Expr, sympy.Integer]:
        return {expr: sympy.Integer(size) for expr, size in zip(self._expressions, sizes, strict=True)}


@functools.lru_cache(maxsize=1 << 12)
def _rounds(expression: sympy.Basic) -> bool:
    return bool(expression.atoms(sympy.Float) or expression.has(ToFloat))


def shape_env() -> ShapeEnv:
    """A record of what a trace with symbolic sizes assumes. It makes no symbols for values or counts."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def at_hint(value: Any) -> Any:
    """The size that an open ``value`` has in this trace, without a guard; any other value is returned as it is."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def is_open(tensor: torch.Tensor) -> bool:
    """Whether a size, a stride or the offset of ``tensor`` is open."""
    return has_symbolic_sizes_strides(tensor)


def for_open_sizes(func: OpOverload) -> Callable[..., Any] | None:
    """A decomposition of ``func`` for symbolic sizes, if its own kernel takes only known sizes; None for others."""
    return decomposition_table[func] if func is torch.ops.aten.constant_pad_nd.default else None


@contextlib.contextmanager
def open_sizes(is_under_torch: Callable[[str], bool]) -> Iterator[None]:
    """What a trace with symbolic sizes runs under. Nodes get an open size as an argument, not a node that computes it.

    To code whose file is not ``is_under_torch`` an open size looks like an ``int``: by its class, and by its text, hash
    and attributes, which add a guard. `stepgraph.capture.python.reads` answers ``type(size)``. Other threads see torch
    as it is.
    """
    tracing = threading.get_ident()
    plain, fetch = proxy_tensor.PythonKeyTracer.create_arg, proxy_tensor.fetch_sym_proxy

    def is_open(value: Any) -> bool:
        ours = type(value) in (torch.SymInt, torch.SymFloat, torch.SymBool) and threading.get_ident() == tracing
        return ours and not value.node.expr.is_number

    def create_arg(tracer: Any, value: Any) -> Any:
        return value if is_open(value) else plain(tracer, value)

    def fetch_sym_proxy(tracer: Any) -> Callable[[Any], Any]:
        known = fetch(tracer)
        return lambda value: value if is_open(value) else known(value)

    with (
        warnings.catch_warnings(),
        replaced(proxy_tensor.PythonKeyTracer, create_arg=create_arg),
        replaced(proxy_tensor, fetch_sym_proxy=fetch_sym_proxy),
        _as_integers(is_under_torch),
        _matmul_in_python() if TORCH < (2, 13) else contextlib.nullcontext(),
    ):
        warnings.simplefilter("ignore")  # what the model warns of was said before; torch warns of sizes in nodes
        yield


@contextlib.contextmanager
def _matmul_in_python() -> Iterator[None]:
    """``matmul`` by its decomposition in Python: that in C++ asks for sizes that are integers. Dropout stays in C++, as
    its decomposition has other nodes."""
    dropout = torch.ops.aten.dropout.default
    in_python = dropout.py_kernels.copy()
    dropout.py_kernels.clear()
    dropout._dispatch_cache.clear()
    try:
        with enable_python_dispatcher():
            yield
    finally:
        dropout.py_kernels.update(in_python)
        dropout._dispatch_cache.clear()


@contextlib.contextmanager
def _as_integers(is_under_torch: Callable[[str], bool]) -> Iterator[None]:
    held = gc.get_referents(vars(torch.SymInt))[0]  # a class's own __class__ cannot be set
    text, key = torch.SymInt.__repr__, torch.SymInt.__hash__
    tracing = threading.get_ident()

    def ours(size: torch.SymInt) -> bool:
        return type(size) is torch.SymInt and threading.get_ident() == tracing

    def class_of(size: torch.SymInt) -> type:
        frame = sys._getframe(1)
        if frame.f_code.co_name == "__instancecheck__":
            frame = frame.f_back or frame
        return int if asked(size, frame) else type(size)

    def asked(size: torch.SymInt, frame: FrameType) -> bool:
        return ours(size) and not is_under_torch(frame.f_code.co_filename)

    def as_text(size: torch.SymInt) -> str:
        return repr(int(size)) if asked(size, sys._getframe(1)) else text(size)

    def as_key(size: torch.SymInt) -> int:
        return hash(int(size)) if asked(size, sys._getframe(1)) else key(size)

    def attribute(size: torch.SymInt, name: str) -> Any:
        if name.startswith("__") or not hasattr(int, name) or not ours(size):
            raise AttributeError(f"'SymInt' object has no attribute {name!r}")
        return getattr(int(size), name)

    held["__class__"] = property(class_of)
    torch.SymInt.__getattr__ = attribute  # Python now looks up the class's attributes again
    try:
        with replaced(torch.SymInt, __repr__=as_text, __hash__=as_key):
            yield
    finally:
        del held["__class__"]
        del torch.SymInt.__getattr__


def keep_mode(output: torch.fx.Node, mode: FakeTensorMode) -> None:
    """Let Inductor compile the graph that ends in ``output`` with the symbols of ``mode``: it asks a result for it."""
    with mode:
        output.args[0][0].meta["example_value"] = torch.empty(())

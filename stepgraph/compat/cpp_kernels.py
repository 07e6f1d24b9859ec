"""Inductor's C++ kernels: several in one translation unit, and their strides without a computer algebra's search.

Inductor has each kernel compiled separately. With the headers precompiled, g++ spends 1.3 of 1.8 processor-seconds on
what is around a kernel. Here the kernels of one module are compiled together, in as many translation units as there are
processes that compile, of at least two kernels each. Their code and the compiler's flags stay.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stepgraph.compat.replaced import replaced


class _Kernel(NamedTuple):
    """A kernel that Inductor wrote; `_wait` replaces it by a function."""

    argtypes: tuple[str, ...]
    source: str


#: What this process has compiled, by Inductor's settings and the kernel. torch never unloads one.
_functions: dict[tuple[bytes, _Kernel], Callable[..., None]] = {}

_HEAD = re.compile(r'\s*#include <torch/csrc/inductor/cpp_prefix\.h>\n(.*)extern "C"\s+(void\s+kernel\(.*)', re.DOTALL)
#: Calls a kernel from Python.
_RUN = """
static PyObject* run_{i}(PyObject*, {arguments}) {{
    try {{
        if ({size} != {count})
            throw std::runtime_error("requires {count} args");
        kernel_{i}::kernel({given});
        Py_RETURN_NONE;
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }}
    return nullptr;
}}
"""
#: How Python calls a function, by Inductor's way to read its arguments: a tuple, since torch 2.15 an array.
_CALLED = {
    "METH_VARARGS": ("PyObject* args", "!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args)"),
    "METH_FASTCALL": ("PyObject* const* args, Py_ssize_t size", "size"),
}
_ALL = """
static PyMethodDef all_kernels[] = {{{methods}}};
static PyObject* make_all() {{
    PyObject* made = PyTuple_New({count});
    for (Py_ssize_t i = 0; made && i < {count}; ++i)
        PyTuple_SET_ITEM(made, i, PyCFunction_New(&all_kernels[i], nullptr));
    return made;
}}
"""


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """Inside, the C++ kernels of each module that Inductor writes or loads are compiled together, and their strides are
    found sooner."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen import cpp

    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def collect(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        plain = _body(source_code) is not None
        return _Kernel(tuple(argtypes), source_code) if plain else alone(self, argtypes, source_code)

    def wait_for_all(self: AsyncCompile, scope: dict[str, Any]) -> None:
        names = {name: (config.get_hash(), value) for name, value in scope.items() if isinstance(value, _Kernel)}
        new = [key for key in dict.fromkeys(names.values()) if key not in _functions]
        compiled = _compiled(self, [kernel for _, kernel in new], alone)
        wait(self, scope)  # for the others
        _functions.update((key, compiled[key[1]]()) for key in new)
        scope.update((name, _functions[key]) for name, key in names.items())

    strides = _strides(cpp.stride_at_vec_range)
    with replaced(AsyncCompile, cpp_pybinding=collect, wait=wait_for_all), replaced(cpp, stride_at_vec_range=strides):
        yield


@functools.cache
def _strides(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, Inductor's stride of an index along a loop's variable, for polynomials without ``sympy.simplify``: it
    takes a seventh of the time in which Inductor makes a piece for any length."""
    import sympy

    def is_polynomial(index: Any) -> bool:
        power = index.is_Pow and index.exp.is_Integer and index.exp > 0 and is_polynomial(index.base)
        parts = (index.is_Add or index.is_Mul) and all(map(is_polynomial, index.args))
        return index.is_Integer or index.is_Symbol or power or parts

    @functools.lru_cache(maxsize=4096)
    def stride(index: Any, variable: Any, vector_length: int | None = None) -> Any:
        if not is_polynomial(index):
            return plain(index, variable, vector_length)
        return sympy.expand(index.xreplace({variable: variable + 1}) - index)

    return stride


def _body(source: str) -> str | None:
    """The kernel in ``source`` without what a translation unit has once; None for one that cannot be among others, as
    it defines macros, includes other headers, or exports other functions."""
    found = _HEAD.fullmatch(source)
    body = found and found[1] + found[2]
    directives = re.findall(r"^\s*#\s*(\w+)", body or "", re.MULTILINE)
    return None if body is None or 'extern "C"' in body or set(directives) - {"pragma"} else body


def _compiled(compiler: Any, kernels: list[_Kernel], alone: Callable) -> dict[_Kernel, Callable[[], Any]]:
    """What gives each kernel's function, once it is compiled."""
    from torch._inductor.async_compile import get_compile_threads

    units = max(1, min(get_compile_threads(), len(kernels) // 2))
    found: dict[_Kernel, Callable[[], Any]] = {}
    for unit in (kernels[i::units] for i in range(units)):
        if len(unit) > 1:
            whole = _unit(compiler, unit)
            found |= {kernel: lambda i=i, whole=whole: whole()[i] for i, kernel in enumerate(unit)}
        elif unit:
            made = alone(compiler, list(unit[0].argtypes), unit[0].source)
            found[unit[0]] = made.result if hasattr(made, "result") else lambda made=made: made
    return found


def _unit(compiler: Any, kernels: Sequence[_Kernel]) -> Callable[[], tuple[Any, ...]]:
    """What gives the functions of ``kernels``, once their translation unit is compiled."""
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    called = "METH_FASTCALL" if "METH_FASTCALL" in CppPythonBindingsCodeCache.suffix_template else "METH_VARARGS"
    arguments, size = _CALLED[called]
    runs, bodies = [], ["#include <torch/csrc/inductor/cpp_prefix.h>"]
    for i, (argtypes, source) in enumerate(kernels):
        bodies.append(f"namespace kernel_{i} {{\n{_body(source)}\n}}")
        types = (kind.replace("const ", "") for kind in argtypes)
        given = ", ".join(f"parse_arg<{kind}>(args, {n})" for n, kind in enumerate(types))
        runs.append(_RUN.format(i=i, count=len(argtypes), given=given, arguments=arguments, size=size))
    pointers = [f"reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_{i}))" for i in range(len(kernels))]
    methods = ", ".join(f'{{"kernel_{i}", {pointer}, {called}, ""}}' for i, pointer in enumerate(pointers))
    code = "".join(runs) + _ALL.format(methods=methods, count=len(kernels))
    escaped = code.replace("{", "{{").replace("}", "}}")  # torch formats it
    own = {"extra_parse_arg": escaped, "call_entry_function": "return make_all();"}
    cache = type("_Together", (CppPythonBindingsCodeCache,), own)
    submit = {"submit_fn": compiler.submit} if get_compile_threads() > 1 else {}
    module = cache.load_pybinding_async([], "\n".join(bodies) + "\n", **submit)
    return lambda: module()()

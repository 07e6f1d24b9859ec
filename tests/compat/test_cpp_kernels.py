"""C++ kernels of a module in one translation unit: the same functions as those compiled separately."""

import contextlib

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.cpp import stride_at_vec_range
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from stepgraph.compat import compiler, cpp_kernels
from stepgraph.compat.cpp_kernels import _body

HEAD = "\n#include <torch/csrc/inductor/cpp_prefix.h>\n"
KERNEL = 'extern "C"  void  kernel(const float* a,\n  float* b)\n{\n#pragma GCC ivdep\n  b[0] = a[0];\n}\n'


@pytest.mark.parametrize(
    "other",
    ["#define N 3\n", "#include <vector>\n", 'extern "C" int two;\n', "  # undef X\n"],
    ids=["macro", "header", "two functions", "indented"],
)
def test_what_cannot_be_among_others_is_compiled_separately(other):
    assert _body(HEAD + KERNEL) == KERNEL[len('extern "C"  ') :]
    assert _body(HEAD + "static int n;\n" + KERNEL).startswith("static int n;\nvoid  kernel(")
    assert _body(HEAD + other + KERNEL) is None and _body(HEAD + KERNEL + other) is None
    assert _body(KERNEL) is None and _body(HEAD + KERNEL.replace("kernel", "other")) is None


def reductions(x, y):
    """Kernels that cannot be one, as each reads a product; two of them are equal."""
    for _ in range(2):
        x = torch.softmax(x @ y, -1)
    z = torch.layer_norm(x @ y, (x.shape[-1],))
    return z, (z @ y).exp().sum(0)


@pytest.mark.parametrize("threads", [1, 2])
def test_functions_are_those_compiled_separately(threads, monkeypatch):
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    units, load = [], CppPythonBindingsCodeCache.load_pybinding_async.__func__

    def counted(cls, argtypes, source, **rest):
        units.append(source.count("kernel("))
        return load(cls, argtypes, source, **rest)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(counted))
    tensors = [torch.randn(24, 24) for _ in range(2)]
    module = make_fx(reductions, tracing_mode="fake")(*tensors)
    results = []
    for together in (cpp_kernels.kernels_together, contextlib.nullcontext):
        monkeypatch.setattr(compiler, "kernels_together", together)
        monkeypatch.setattr(cpp_kernels, "_functions", {})
        units.clear()
        examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        function = compiler.inductor_compile(module, examples, {"fx_graph_cache": False})
        results.append((list(units), function(list(tensors))))
        for made in cpp_kernels._functions.values():
            with pytest.raises(RuntimeError, match=r"requires \d args"):
                made()
    assert results[0][0] == [3]  # one unit; the two equal kernels are one
    assert results[1][0] == [1, 1, 1]
    for ours, theirs, eager in zip(results[0][1], results[1][1], reductions(*tensors), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


D0, D1, S0 = sympy.symbols("d0 d1 s0", integer=True, positive=True)
TERMS = (D0, D1, 64 * D0, D1 * S0, S0 * D0 * D1, S0**2, 3 * D1 * (S0 + 1), sympy.Integer(7))
OTHERS = (FloorDiv(D0, 16), ModularIndexing(D1, 1, 32), D0 * FloorDiv(S0, 4))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(TERMS + OTHERS), max_size=4), st.sampled_from([None, 16]))
def test_strides_are_inductor_s(terms, length):
    calls = []

    def plain(*arguments):
        calls.append(arguments)
        return stride_at_vec_range(*arguments)

    stride, index = cpp_kernels._strides.__wrapped__(plain), sympy.Add(*terms)
    for variable in (D0, D1):
        assert sympy.expand(stride(index, variable, length) - stride_at_vec_range(index, variable, length)) == 0
        assert stride(index, variable, length).free_symbols == stride_at_vec_range(index, variable, length).free_symbols
    assert bool(calls) == any(index.has(kind) for kind in (FloorDiv, ModularIndexing))

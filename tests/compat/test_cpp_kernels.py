"""C++ kernels of a module in one translation unit: the same functions as those compiled separately."""

import contextlib

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch.fx.experimental.proxy_tensor import make_fx

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
def test_functions_are_those_compiled_separately(threads, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    units, load = [], CppPythonBindingsCodeCache.load_pybinding_async.__func__

    def counted(cls, argtypes, source, **rest):
        units.append(source.count("kernel("))
        return load(cls, argtypes, source, **rest)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(counted))
    given = [torch.randn(24, 24) for _ in range(2)]
    module = make_fx(reductions, tracing_mode="fake")(*given)
    results = []
    for together in (cpp_kernels.kernels_together, contextlib.nullcontext):
        monkeypatch.setattr(compiler, "kernels_together", together)
        monkeypatch.setattr(cpp_kernels, "_functions", {})
        units.clear()
        examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        function = compiler.inductor_compile(module, examples, {"fx_graph_cache": False})
        results.append((list(units), function(list(given))))
        for made in cpp_kernels._functions.values():
            with pytest.raises(RuntimeError, match=r"requires \d args"):
                made()
    assert results[0][0] == [3]  # one unit; the two equal kernels are one
    assert results[1][0] == [1, 1, 1]
    for ours, theirs, eager in zip(results[0][1], results[1][1], reductions(*given), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)

"""Grouped products by QuACK: which take it, what is refused, and what the package is called with."""

import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.capture import StepGraph
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec, OutputSpec
from stepgraph.kernels.moe import grouped, grouped_mm, grouped_mm_weight, quack
from stepgraph.passes import StepOptions, chosen, get, run_passes
from stepgraph.passes.target import Target

ours = torch.ops.stepgraph
PRODUCTS = (ours.grouped_mm.default, ours.grouped_mm_weight.default)


def products(dtype=torch.bfloat16):
    """A step of a grouped product and both its gradients, on a fake GPU."""

    def program(rows, weight, offsets):
        y = ours.grouped_mm(rows, weight.mT, offsets)
        return y, ours.grouped_mm(y, weight, offsets), ours.grouped_mm_weight(y, rows, offsets)

    with FakeTensorMode():
        rows = torch.empty(64, 16, dtype=dtype, device="cuda")
        weight = torch.empty(4, 24, 16, dtype=dtype, device="cuda")
        module = make_fx(program)(rows, weight, torch.empty(4, dtype=torch.int32, device="cuda"))
    for node in module.graph.find_nodes(op="call_function", target=PRODUCTS[0]):
        set_provenance(node, Provenance("layers.0.moe", "forward", "model.py:1"))
    inputs = [InputSpec("parameter", name) for name in ("rows", "weight", "offsets")]
    return StepGraph(module, inputs, [OutputSpec("metric", str(i)) for i in range(3)])


def run(step):
    (report,) = run_passes(step, [get("grouped_products")], target=Target("cuda", capability=(9, 0)))
    found = [n for target in PRODUCTS for n in step.graph.find_nodes(op="call_function", target=target)]
    return report, [node.args[3] if len(node.args) > 3 else "torch" for node in found]


@pytest.fixture
def package(monkeypatch):
    """A package in the place of QuACK's, which multiplies by the reference and notes how it is called."""
    calls = []

    def gemm(a, b, *, tuned, cu_seqlens_m=None, cu_seqlens_k=None):
        starts = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
        assert not tuned and starts.dtype == torch.int32 and starts[0] == 0
        calls.append("k" if cu_seqlens_m is None else "m")
        if cu_seqlens_m is not None:
            return grouped.reference(a, b, starts[1:])
        return grouped.weight_reference(a.t(), b, starts[1:])

    monkeypatch.setattr(quack, "_package", lambda: types.SimpleNamespace(gemm=gemm))
    monkeypatch.setattr(quack, "unavailable", lambda: None)
    return calls


def test_all_products_by_the_package(package):
    report, kernels = run(products())
    assert kernels == ["quack"] * 3 and report.summary == "3 of 3 grouped products by QuACK" and not report.notes


def test_products_that_it_does_not_take_are_refused(package):
    with pytest.raises(ValueError, match=r"^grouped=quack: no product is in bf16 .*; allowed here: grouped=torch"):
        run(products(torch.float32))


def test_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setattr(quack, "installed", lambda: False)
    quack.unavailable.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"^grouped=quack: quack-kernels is not installed; allowed here: .*torch"):
            run(products())
        with pytest.raises(ValueError, match=r"not installed: pip install quack-kernels, or choose grouped=torch"):
            quack.product(*[torch.zeros(1)] * 3)
    finally:
        quack.unavailable.cache_clear()


def test_a_package_that_does_not_load_says_so_in_one_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack/__init__.py").touch()
    (tmp_path / "quack/gemm_interface.py").write_text("import a_library_that_is_not_there\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    quack.unavailable.cache_clear()
    quack._package.cache_clear()
    try:
        assert quack.installed() and "cannot be imported: No module named" in quack.unavailable()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
            del sys.modules[name]
        quack.unavailable.cache_clear()
        quack._package.cache_clear()


def test_what_the_package_is_called_with(package):
    """Groups by where each begins; the same results as the reference, whose layouts those of the package are."""
    rows, weight, dy = torch.randn(7, 8), torch.randn(3, 8, 16), torch.randn(7, 16)
    offsets = torch.tensor([2, 2, 7], dtype=torch.int32)
    assert torch.equal(quack.product(rows, weight, offsets), grouped_mm(rows, weight, offsets))
    assert torch.equal(quack.weight_product(rows, dy, offsets), grouped_mm_weight(rows, dy, offsets))
    assert package == ["m", "k"]


def test_gradients_are_by_the_kernel_of_their_product(monkeypatch):
    asked = []
    real = grouped.reference, grouped.weight_reference
    for name, function in zip(("_check", "_check_weight"), (grouped._check, grouped._check_weight), strict=True):
        monkeypatch.setattr(grouped, name, lambda *args, f=function: (asked.append(args[3]), f(*args))[1])
    rows, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    grouped_mm(rows, weight, offsets, "quack").sum().backward()
    assert asked and set(asked) == {"quack"}
    assert torch.equal(rows.grad, real[0](torch.ones(5, 8), weight.detach().mT, offsets))


def test_options():
    assert "grouped_products" in {p.name for p in chosen(StepOptions(grouped="quack"))}
    assert "grouped_products" not in {p.name for p in chosen(StepOptions())}
    assert "grouped_products" not in {p.name for p in chosen(StepOptions("exact"))}
    with pytest.raises(ValueError, match="grouped=quack with passes=exact"):
        chosen(StepOptions("exact", grouped="quack"))
    with pytest.raises(ValueError, match="liger"):
        grouped_mm(torch.zeros(1, 8), torch.zeros(1, 8, 8), torch.ones(1, dtype=torch.int32), "liger")

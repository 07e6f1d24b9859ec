"""Grouped products by QuACK: which take it, what is refused, and what the package is called with."""

import dataclasses
import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.capture import StepGraph
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import Metric, Parameter
from stepgraph.kernels import quack
from stepgraph.kernels.moe import grouped, grouped_mm, grouped_mm_weight
from stepgraph.passes import StepOptions, chosen, get, run_passes
from stepgraph.passes.contract import Target

ours = torch.ops.stepgraph
PRODUCTS = (ours.grouped_mm.default, ours.grouped_mm_weight.default)


def products(dtype=torch.bfloat16, R=64, D=16, F=24):
    """A step of a grouped product and both its gradients, on a fake GPU, with 4 experts."""

    def program(rows, weight, offsets):
        y = ours.grouped_mm(rows, weight.mT, offsets)
        return y, ours.grouped_mm(y, weight, offsets), ours.grouped_mm_weight(y, rows, offsets)

    with FakeTensorMode():
        rows = torch.empty(R, D, dtype=dtype, device="cuda")
        weight = torch.empty(4, F, D, dtype=dtype, device="cuda")
        module = make_fx(program)(rows, weight, torch.empty(4, dtype=torch.int32, device="cuda"))
    for node in (n for target in PRODUCTS for n in module.graph.find_nodes(op="call_function", target=target)):
        set_provenance(node, Provenance("layers.0.moe", "forward", "model.py:1"))
    inputs = [InputSpec(Parameter(name)) for name in ("rows", "weight", "offsets")]
    return StepGraph(module, inputs, [Metric(str(i)) for i in range(3)])


def run(step, backend="quack", capability=(9, 0)):
    target = Target("cuda", capability=capability)
    (report,) = run_passes(step, [get("grouped_products", backend=backend)], target=target)
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


def test_auto_takes_the_package_where_it_was_measured_faster(package):
    report, kernels = run(products(R=4096), "auto")
    assert kernels == ["quack"] * 3 and report.summary == "3 of 3 grouped products by QuACK"
    assert report.notes == ["QuACK's were faster for such products on one H200 (benchmarks/h200_grouped.json)"]


@pytest.mark.parametrize(
    ("sizes", "capability", "why"),
    [
        ({"R": 4095}, (9, 0), "none is in bf16 with 1,024 rows per expert or more, and smaller ones were not measured"),
        ({"R": 4096, "dtype": torch.float32}, (9, 0), "none is in bf16 with 1,024 rows per expert or more, and "),
        ({"R": 4096}, (10, 0), "QuACK's were measured on compute capability 9.0 alone"),
        ({"R": 4096}, (9, 0), "quack-kernels is not installed"),
    ],
)
def test_auto_leaves_torchs_and_says_why(sizes, capability, why, package, monkeypatch):
    if "not installed" in why:
        monkeypatch.setattr(quack, "unavailable", lambda: why)
    report, kernels = run(products(**sizes), "auto", capability)
    assert kernels == ["torch"] * 3 and report.summary == "0 of 3 grouped products by QuACK"
    assert len(report.notes) == 1 and report.notes[0].startswith(f"torch's stay: {why}")


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
    monkeypatch.setattr(grouped, "_check_backend", asked.append)
    rows, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    grouped_mm(rows, weight, offsets, "quack").sum().backward()
    assert asked and set(asked) == {"quack"}
    assert torch.equal(rows.grad, real[0](torch.ones(5, 8), weight.detach().mT, offsets))


def test_inductor_keeps_the_kernel(package, monkeypatch):
    """Compiled, the operator is told whose product it is; a CPU runs the reference."""
    mine = dataclasses.replace(get("grouped_products"), needs_cuda=False)
    asked = []

    def loss_fn(model, batch):
        return grouped_mm(batch["rows"], model.weight.mT, batch["offsets"]).square().mean()

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(3, 8, 16))
    batch = {"rows": torch.randn(7, 16), "offsets": torch.tensor([2, 2, 7], dtype=torch.int32)}
    loss_fn(model, batch).backward()
    expected, model.weight.grad = model.weight.grad, None
    with monkeypatch.context() as patch:
        patch.setattr(grouped, "on_device", lambda x: True)  # while passes look at the graph
        step = stepgraph.capture(model, loss_fn, batch, passes=[mine, get("inductor")])
    monkeypatch.setattr(grouped, "_check_backend", asked.append)
    step(batch)
    assert set(asked) == {"quack"}
    torch.testing.assert_close(model.weight.grad, expected)


def test_options():
    assert "grouped_products" in {p.name for p in chosen(StepOptions(grouped="quack"))}
    assert "grouped_products" in {p.name for p in chosen(StepOptions(grouped="auto"))}
    assert "grouped_products" in {p.name for p in chosen(StepOptions())}
    assert "grouped_products" not in {p.name for p in chosen(StepOptions(grouped="torch"))}
    assert "grouped_products" not in {p.name for p in chosen(StepOptions("exact", grouped="auto"))}
    assert "grouped_products" not in {p.name for p in chosen(StepOptions("exact"))}
    with pytest.raises(ValueError, match="grouped=quack with passes=exact"):
        chosen(StepOptions("exact", grouped="quack"))
    with pytest.raises(ValueError, match="liger"):
        grouped_mm(torch.zeros(1, 8), torch.zeros(1, 8, 8), torch.ones(1, dtype=torch.int32), "liger")

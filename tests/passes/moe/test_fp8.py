"""The pass fp8_experts: the bits of products that eager casts by hand, and a reason for what it leaves."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.capture import StepGraph
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import InputSpec
from stepgraph.graph.values import Metric, Parameter
from stepgraph.kernels.fp8 import cast_scaled_rows
from stepgraph.kernels.moe import (
    cast_packed_rows,
    cast_scaled_groups,
    grouped_mm,
    grouped_scaled_mm,
    grouped_scaled_mm_weight,
)
from stepgraph.passes import StepOptions, chosen, get, run_passes
from stepgraph.passes.contract import Target

E4M3 = torch.float8_e4m3fn
ours = torch.ops.stepgraph
PRODUCTS = (ours.grouped_mm.default, ours.grouped_mm_weight.default)


def products(dtype=torch.bfloat16, R=64, D=16, F=24, master=False):
    """A step of a grouped product and both its gradients, on a fake GPU, with 4 experts. ``master``: whose
    weights are rounded from fp32."""

    def program(rows, weight, offsets):
        weight = weight.to(dtype)
        y = ours.grouped_mm(rows, weight.mT, offsets)
        return y, ours.grouped_mm(y, weight, offsets), ours.grouped_mm_weight(y, rows, offsets)

    with FakeTensorMode():
        rows = torch.empty(R, D, dtype=dtype, device="cuda")
        weight = torch.empty(4, F, D, dtype=torch.float32 if master else dtype, device="cuda")
        module = make_fx(program)(rows, weight, torch.empty(4, dtype=torch.int32, device="cuda"))
    for node in (
        n for n in module.graph.nodes if n.target in (ours.grouped_mm.default, ours.grouped_mm_weight.default)
    ):
        set_provenance(node, Provenance("layers.0.moe", "forward", "model.py:1"))
    inputs = [InputSpec(Parameter(name)) for name in ("rows", "weight", "offsets")]
    return StepGraph(module, inputs, [Metric(str(i)) for i in range(3)])


class Product(torch.autograd.Function):
    """``rows W_e^T`` of each expert, every side cast to fp8."""

    @staticmethod
    def forward(ctx, rows, weight, offsets, in_fp8):
        ctx.save_for_backward(rows, weight, offsets)
        ctx.in_fp8 = in_fp8
        return _product(rows, weight, offsets)

    @staticmethod
    def backward(ctx, dy):
        rows, weight, offsets = ctx.saved_tensors
        dw = ours.grouped_mm_weight(dy, rows, offsets)
        if ctx.in_fp8:
            # Of what products read, the cast; of a gradient that only this one reads, itself.
            sides = cast_packed_rows(dy) if ctx.needs_input_grad[0] else dy, cast_packed_rows(rows)
            (a, scale_a, ends), (b, scale_b, _) = (cast_scaled_groups(x, offsets, E4M3) for x in sides)
            dw = grouped_scaled_mm_weight(a, b, scale_a, scale_b, ends)
        return _product(dy, weight.mT.contiguous(), offsets), dw, None, None


def _product(rows, weight, offsets):
    E, N, K = weight.shape
    w, weight_scale, _, _ = cast_scaled_rows(weight.reshape(-1, K), E4M3, True, False)
    return grouped_scaled_mm(cast_packed_rows(rows), w.view(E, N, K), weight_scale.view(E, N), offsets)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 48, 32).bfloat16())
        self.down = nn.Parameter(torch.randn(4, 32, 48).bfloat16())
        self.product = lambda rows, weight, offsets: grouped_mm(rows, weight.mT, offsets)

    def forward(self, rows, offsets):
        return self.product(nn.functional.silu(self.product(rows, self.up, offsets)), self.down, offsets)


def loss_fn(model, batch):
    return model(*batch).float().square().mean()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise-bf16-weight-gradients"])
def test_the_bits_of_products_that_are_cast_by_hand(recipe):
    batch, models = (
        (torch.randn(64, 32).bfloat16(), torch.tensor([5, 5, 30, 60], dtype=torch.int32)),
        [Experts(), Experts()],
    )
    models[1].product = lambda *given: Product.apply(*given, recipe == "rowwise")
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    options = StepOptions(inductor="off", fp8=recipe, fp8_experts=True)
    passes = [p.with_options(unprofitable=True) if p.name == "fp8_experts" else p for p in chosen(options)]
    step = stepgraph.capture(models[0], loss_fn, batch, optimizers[0], passes=passes)
    for _ in range(2):
        loss = loss_fn(models[1], batch)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(batch), loss.detach())
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    report = next(r for r in step.report if r.name == "fp8_experts")
    counts = {"rowwise": 5, "rowwise-bf16-weight-gradients": 3}
    assert report.summary == f"{counts[recipe]} of 5 products of expert rows in fp8"
    assert not [n for n in report.notes if "by the recipe" not in n]


def test_weights_in_fp32_are_cast_without_a_copy_in_bf16():
    """Forward reads the weight itself; backward, which reads it transposed, rounds it again."""
    step = products(F=32, master=True)
    run_passes(step, [get("fp8_experts", unprofitable=True)])
    forward, backward = step.graph.find_nodes(op="call_function", target=ours.cast_scaled_rows.default)
    (rounded,) = step.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert [n.args[0].meta["val"].dtype for n in (forward, backward)] == [torch.float32, torch.bfloat16]
    assert forward < rounded < backward


def test_weights_that_are_written_after_their_cast_are_not_read_again():
    step = products(F=32, master=True)
    first, (cast,) = step.calling(PRODUCTS[0])[0], step.calling(torch.ops.aten._to_copy.default)
    with step.graph.inserting_before(first):
        step.graph.call_function(torch.ops.aten.mul_.Tensor, (cast.args[0], 2.0)).meta.update(first.meta)
    run_passes(step, [get("fp8_experts", unprofitable=True)])
    casts = step.calling(ours.cast_scaled_rows.default)
    assert {n.args[0].meta["val"].dtype for n in casts} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("sizes", "options", "why"),
    [
        ({"dtype": torch.float32}, {}, "3 stay in bf16: float32, and fp8 replaces only bf16"),
        ({"D": 24}, {}, "2 stay in bf16: 24 x 24 is not a multiple of 16 in both dimensions"),
        ({"D": 32}, {"skip": ("layers.0.*",)}, "2 stay in bf16: fp8_skip=layers.0.*"),
        ({"D": 32, "R": 64}, {"unprofitable": False}, "64 rows of 24 x 32 save nothing: "),
    ],
)
def test_what_stays_in_bf16_is_said(sizes, options, why):
    step = products(**{"D": 32} | sizes)
    (report,) = run_passes(step, [get("fp8_experts", **{"unprofitable": True} | options)])
    assert any(why in note for note in report.notes) or report.changed == 0, report.notes


def test_gradients_of_weights_that_read_packed_rows_save_time():
    """DeepSeek-V3 16B's widths: casts from bf16 would take what the product saves."""
    step = products(R=196608, F=1408, D=2048)
    (report,) = run_passes(step, [get("fp8_experts")])
    assert (report.changed, report.notes) == (3, []), report.notes
    step = products(R=196608, F=1408, D=2048)
    for node in step.graph.find_nodes(op="call_function", target=ours.grouped_mm.default):
        set_provenance(node, Provenance("other", "forward", "model.py:1"))
    (report,) = run_passes(step, [get("fp8_experts", skip=("other",))])
    assert report.changed == 0 and any("save nothing" in note for note in report.notes), report.notes


def test_the_capability_of_the_gpu_and_rows_that_nothing_reads():
    step = products(F=32, D=32)
    (report,) = run_passes(step, [get("fp8_experts", unprofitable=True)], target=Target("cuda", capability=(8, 9)))
    assert report.notes == ["3 stay in bf16: torch multiplies groups in fp8 only on compute capability 9.0"]
    for node in step.graph.find_nodes(op="call_function", target=ours.grouped_mm.default):
        node.kwargs = {"zero_rest": False}
    *_, report = run_passes(step, [get("fp8_experts", unprofitable=True)], target=Target("cuda", capability=(9, 0)))
    found = step.graph.find_nodes(op="call_function", target=ours.grouped_scaled_mm.default)
    assert report.changed == 3 and [node.kwargs for node in found] == [{"zero_rest": False}] * 2
    step.graph.lint()


def test_options():
    assert "fp8_experts" not in [p.name for p in chosen(StepOptions(fp8="rowwise"))]
    with pytest.raises(ValueError, match=r"^fp8_experts needs fp8, and fp8=off: add fp8=rowwise"):
        chosen(StepOptions(fp8_experts=True))
    found = {p.name: p.options for p in chosen(StepOptions(fp8="rowwise-bf16-weight-gradients", fp8_experts=True))}
    assert dataclasses.asdict(found["fp8_experts"])["weight_gradients"] is False

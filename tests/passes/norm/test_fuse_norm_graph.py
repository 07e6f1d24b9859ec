"""The norm pass: the graph it leaves, CUDA's fused operators, and the choice between kernel, Inductor and eager."""

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F

from stepgraph.capture import InputSpec, Provenance, StepGraph, set_provenance
from stepgraph.compat import FakeTensorMode
from stepgraph.costs.memory import estimate_memory
from stepgraph.graph.marks import KEEP_EAGER
from stepgraph.graph.values import Metric, Parameter
from stepgraph.inductor.regional import region_of
from stepgraph.models import Golf, GolfConfig
from stepgraph.passes import configured, get, run_passes
from stepgraph.passes.memory.rematerialize import rematerialize
from tests.passes.norm.norm_checks import BF16, CLEAN, GOLF, KERNEL, check, run

aten, ours = torch.ops.aten, torch.ops.stepgraph


# What the graph looks like afterwards


def test_one_operator_takes_in_residual_and_gradient(tools):
    _, _, step = run(tools.llama(BF16, n_layers=1), tools.next_token_loss, tools.tokens()[0], KERNEL)
    graph = step.graph.graph
    norms = graph.find_nodes(op="call_function", target=ours.norm.default)
    backwards = graph.find_nodes(op="call_function", target=ours.norm_backward.default)
    assert [node.args[3] is not None for node in norms] == [False, True, True]
    assert [node.args[5] is not None for node in backwards] == [False, True, True]
    # The sum is written once and both read it: the next block's residual, and backward.
    h = next(user for user in norms[1].users if user.args[1] == 1)
    assert norms[2].args[3] is h and backwards[1].args[1] is h
    adds = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert not any(a.meta["val"].shape == h.meta["val"].shape and a.args[0] in (h, norms[2]) for a in adds)


def test_memory_is_saved(tools):
    """A composite norm in bf16 keeps an fp32 copy of its rows for backward; the operator keeps one number per row."""
    model, batch = tools.llama(BF16, dim=64), tools.tokens(batch=8, length=16)[0]
    _, _, plain = run(model, tools.next_token_loss, batch, CLEAN)
    _, _, fused = run(model, tools.next_token_loss, batch, KERNEL)
    before, after = (estimate_memory(step.graph.graph) for step in (plain, fused))
    stream = 8 * 16 * 64 * 2  # bytes of the residual stream
    assert before.saved - after.saved > 5 * 2 * stream  # five norms, fp32 each: xhat and the rows
    assert after.peak < before.peak


def test_what_backward_reads_is_not_computed_again(tools):
    """The choice of what forward hands to backward keeps the operators' results."""
    records, traced, *_ = tools.prepared("llama")
    step = tools.copied(traced.step)
    run_passes(step, KERNEL)
    rematerialize(step)
    step.graph.lint()
    step.module.recompile()
    assert len(step.graph.find_nodes(op="call_function", target=ours.norm.default)) == 5
    # AdamW divides by the gradient's size: where that is next to nothing, rounding moves a weight by up to its rate.
    for expected, given in zip(records, tools.captured_records("llama", step, 2), strict=False):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


# Fused RMS norms, which only CUDA traces


def fused_rms(device, n=64, residual=True, dtype=BF16, m=512):
    """Forward and backward of ``branch + residual -> _fused_rms_norm`` as CUDA's trace has them, by hand."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    shapes = {"x": (m, n), "residual": (m, n), "w": (n,), "dy": (m, n), "dh": (m, n)}

    def call(target, *args, phase):
        node = graph.call_function(target, args)
        set_provenance(node, Provenance("norm", phase, "model.py:1"))
        values = torch.fx.map_arg(args, lambda a: a.meta["val"])
        rows = values[0][0] if isinstance(values[0], (list, tuple)) else values[0]
        with mode:
            if target is aten._fused_rms_norm.default:
                stat = rows.new_empty(*rows.shape[:-1], 1, dtype=torch.float32)
                node.meta["val"] = (torch.empty_like(rows), stat)
            elif target is aten._fused_rms_norm_backward.default:
                node.meta["val"] = (torch.empty_like(rows), torch.empty_like(values[4]))
            else:
                node.meta["val"] = target(*values)
        return node

    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = graph.placeholder(name)
        with mode:
            inputs[name].meta["val"] = torch.empty(shape, dtype=dtype, device=device)
    x, other, w, dy, dh = inputs.values()
    h = call(aten.add.Tensor, x, other, phase="forward") if residual else x
    norm = call(aten._fused_rms_norm.default, h, [n], w, 1e-5, phase="forward")
    y, rstd = (call(operator.getitem, norm, i, phase="forward") for i in range(2))
    slope = call(aten.mul.Tensor, dy, y, phase="backward")
    backward = call(aten._fused_rms_norm_backward.default, slope, h, [n], rstd, w, [True, True], phase="backward")
    dx, dw = (call(operator.getitem, backward, i, phase="backward") for i in range(2))
    total = call(aten.add.Tensor, dh, dx, phase="backward")
    graph.output([y, h, total, dw])
    specs = [InputSpec(Parameter(name)) for name in shapes]
    outputs = [Metric(name) for name in ("y", "h", "dx", "dw")]
    return StepGraph(torch.fx.GraphModule(torch.nn.Module(), graph), specs, outputs)


@pytest.mark.parametrize("residual", [False, True])
def test_fused_rms_norm(residual):
    step = fused_rms("cpu", residual=residual, dtype=torch.float32)
    (report,) = run_passes(step, [get("fuse_norm", choice="kernel")])
    assert report.notes[0] == "fused rms: 1 forward, 1 backward" and report.changed == 1
    assert f"{int(residual)} residual adds and 1 residual gradients taken in" in report.summary
    targets = {str(node.target) for node in step.nodes()}
    assert not any("fused" in name for name in targets) and len(list(step.nodes())) < 12
    values = [torch.randn(node.meta["val"].shape) for node in step.placeholders()]
    y, h, dx, dw = step.module(*values)
    x, other, w, dy, dh = (value.double().requires_grad_() for value in values)
    total = x + other if residual else x
    expected = F.rms_norm(total, (64,), w, 1e-5)
    grads = torch.autograd.grad(expected, (total if residual else x, w), dy * expected.detach())
    for given, right in ((y, expected), (h, total), (dx, grads[0] + dh), (dw, grads[1])):
        torch.testing.assert_close(given.double(), right.detach(), rtol=1e-4, atol=1e-4)


def test_auto_on_a_gpu():
    """By bytes and measured bandwidths, our kernels are chosen for wide rows; a forced choice is obeyed."""
    for choice, word in (("auto", "our kernels"), ("kernel", "our kernels"), ("inductor", "Inductor"),
                         ("eager", "eager's operators")):  # fmt: skip
        step = fused_rms("cuda", n=4096)
        (report,) = run_passes(step, [get("fuse_norm", choice=choice)])
        assert report.summary.startswith(f"1 norm: 1 by {word}")
        replaced = step.graph.find_nodes(op="call_function", target=ours.norm_backward.default)
        assert bool(replaced) == (word == "our kernels")
        regions = {region.id for region in map(region_of, step.nodes()) if region}
        assert regions == ({"norm.0.forward", "norm.0.backward"} if word == "Inductor" else set())
        eager = [node for node in step.nodes() if node.meta.get(KEEP_EAGER)]
        assert bool(eager) == (choice == "eager")


@pytest.mark.parametrize("residual", [False, True])
def test_auto_takes_our_kernels_at_squares_that_inductor_does_not_join(residual):
    """Rows of 16384: Inductor's backward is 0.61 of ours there (`benchmarks/h200_compiled_squares.json`)."""
    step = fused_rms("cuda", n=16384, residual=residual, m=16384)
    (report,) = run_passes(step, [get("fuse_norm")])
    assert report.summary.startswith("1 norm: 1 by our kernels")
    assert step.graph.find_nodes(op="call_function", target=ours.norm_backward.default)


def test_regions_take_the_pointwise_neighbours():
    step = fused_rms("cuda")
    run_passes(step, [get("fuse_norm", choice="inductor")])
    regions = {node.name: region.id for node in step.nodes() if (region := region_of(node))}
    assert regions["add_tensor"] == "norm.0.forward"  # the residual add
    # What makes dy, and the sum with the residual gradient.
    assert regions["mul_tensor"] == regions["add_tensor_1"] == "norm.0.backward"


# Choices


def test_auto_leaves_a_cpu_to_inductor(tools):
    _, traced, *_ = tools.prepared("llama")
    for compiled, word in ((True, "Inductor"), (False, "eager's operators")):
        step = tools.copied(traced.step)
        before = tools.targets(step)
        (report,) = run_passes(step, [get("fuse_norm", compiled=compiled)])
        assert report.summary.startswith(f"5 norms: 5 by {word}") and report.changed == 0
        assert tools.targets(step) == before


def test_wrong_choices():
    with pytest.raises(ValueError, match="unknown choice of norm 'kernels': did you mean 'kernel'"):
        get("fuse_norm", choice="kernels")
    with pytest.raises(ValueError, match="norm=kernel with passes=exact"):
        configured("exact", norm="kernel")
    with pytest.raises(ValueError, match="norm=inductor with inductor=off"):
        configured(inductor="off", norm="inductor")


def test_configured_reaches_the_pass():
    chosen = next(p for p in configured(norm="kernel", inductor="off") if p.name == "fuse_norm")
    assert (chosen.options.choice, chosen.options.compiled, chosen.tier) == ("kernel", False, "numerics")
    names = [p.name for p in configured()]
    assert names.index("inplace_update") < names.index("fuse_norm") < names.index("fuse_loss")


@pytest.mark.slow  # Inductor's C++ compiler
def test_inductor_calls_our_operators_from_within_its_piece(tools):
    model, batch = Golf(GolfConfig(**{**vars(GOLF), "n_layers": 1})), tools.tokens()[0]
    step = check(model, tools.next_token_loss, batch, configured(norm="kernel"))
    assert tools.called(step) == ["compiled", "aten.embedding_dense_backward.default"]


@pytest.mark.slow
def test_eager_norms_stay_out_of_inductor(tools):
    step = check(tools.llama(n_layers=1), tools.next_token_loss, tools.tokens()[0], configured(norm="eager"))
    runs = [compiled for compiled, _ in itertools.groupby(call == "compiled" for call in tools.called(step))]
    assert runs.count(False) >= 6 and runs.count(True) >= 6

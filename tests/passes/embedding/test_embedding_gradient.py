"""The gradient of an embedding's table by our operator: same gradients where it is put in, a reason where it is not."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.graph.facts import is_mutating
from stepgraph.graph.partition import needs_host
from stepgraph.graph.provenance import provenance
from stepgraph.kernels.embedding.gradient import embedding_backward
from stepgraph.passes import configured, get, run_passes
from stepgraph.passes.compile.inductor import adds_in_any_order

BEFORE, AFTER = torch.ops.aten.embedding_dense_backward.default, embedding_backward._opoverload
PASS = replace(get("embedding_gradient"), needs_cuda=False)


def found(step, target):
    return step.graph.find_nodes(op="call_function", target=target)


def lookup_loss(model, batch):
    return (model(batch["index"]).float().tanh() * batch["scale"]).sum()


def lookups(n=400, D=16, rows=8):
    return {"index": torch.randint(rows, (n,)), "scale": torch.randn(n, D)}


def report_of(step):
    return next(report for report in step.report if report.name == "embedding_gradient")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # bf16: each row is rounded once instead of after every addition.
    [("llama gradients", 1e-6), ("llama bf16 gradients, accumulated", 2e-2), ("tied", 1e-6), ("hugging face", 1e-6)],
)
def test_models(tools, name, tolerance):
    records, traced, *_ = tools.prepared(name)
    step = tools.copied(traced.step)
    count = len(found(step, BEFORE))
    places, values = zip(*((provenance(node), node.meta["val"]) for node in found(step, BEFORE)), strict=True)
    (report,) = run_passes(step, [PASS])
    assert count == 1
    assert (report.matched, report.changed, report.notes) == (count, count, [])
    assert f"{count} of {count} lookup gradients summed in a sorted order" in report.line()
    assert not found(step, BEFORE) and len(found(step, AFTER)) == count
    for node, place, value in zip(found(step, AFTER), places, values, strict=True):
        made = node.meta["val"]
        assert provenance(node) == place
        assert (made.shape, made.dtype, made.stride(), made.device) == (
            value.shape, value.dtype, value.stride(), value.device,
        )  # fmt: skip
    actual = tools.captured_records(name, step, 2)
    for expected, given in zip(records, actual, strict=False):
        for key, value in expected.items():
            torch.testing.assert_close(
                given[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k} {m}"
            )


def test_a_padding_row_gets_nothing():
    model, batch = nn.Embedding(8, 16, padding_idx=3), lookups()
    expected = copy.deepcopy(model)
    lookup_loss(expected, batch).backward()
    step = stepgraph.capture(model, lookup_loss, batch, passes=[PASS])
    step(batch)
    assert report_of(step).changed == 1 and not model.weight.grad[3].any()
    torch.testing.assert_close(model.weight.grad, expected.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scale_grad_by_freq": True}, "it is scaled by how often a row was looked up"),
        ({"dtype": torch.float64}, "a gradient in torch.float64"),
    ],
)
def test_what_stays(options, why):
    model, batch = nn.Embedding(8, 16, **options), lookups()
    expected = copy.deepcopy(model)
    lookup_loss(expected, batch).backward()
    step = stepgraph.capture(model, lookup_loss, batch, passes=[PASS])
    step(batch)
    report = report_of(step)
    assert (report.matched, report.changed) == (1, 0)
    (note,) = report.notes
    assert note.startswith("embedding_dense_backward") and note.endswith(f"is left unchanged: {why}")
    assert torch.equal(model.weight.grad, expected.weight.grad)


class Gather(nn.Module):
    """Rows of a projection, gathered by indices as experts' tokens are."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8).to(dtype))

    def forward(self, x, *index):
        rows = x @ self.weight
        return rows[:, index[1]] if index[0] is None else rows[index]


def gather_loss(model, batch):
    return (model(batch["x"], *batch["index"]).float().tanh() ** 2).sum()


@pytest.mark.parametrize("accumulated", [1, 5])
@pytest.mark.parametrize("shape", [(30,), (6, 5), (0,)])
def test_rows_that_were_gathered(shape, accumulated):
    """Also with indices that count from the end, in steps with other indices."""
    model = Gather()
    expected = copy.deepcopy(model)

    def batch():
        return {"x": torch.randn(9, 16), "index": [torch.randint(-9, 9, shape)]}

    step = stepgraph.capture(model, gather_loss, batch(), passes=[PASS])
    assert report_of(step).changed == 1 and not found(step.graph, torch.ops.aten.index_put.default)
    for _ in range(accumulated):
        given = batch()
        step(given)
        gather_loss(expected, given).backward()
    torch.testing.assert_close(model.weight.grad, expected.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "dtype", "why"),
    [
        ([torch.tensor([1, 1, 3]), torch.tensor([0, 0, 5])], torch.float32, "not one tensor of indices"),
        ([None, torch.tensor([0, 0, 5])], torch.float32, "not one tensor of indices"),
        ([torch.tensor([0, 0, 5])], torch.float64, "a gradient in torch.float64"),
    ],
)
def test_indexings_that_stay(index, dtype, why):
    model = Gather(dtype)
    expected = copy.deepcopy(model)
    batch = {"x": torch.randn(9, 16, dtype=dtype), "index": index}
    step = stepgraph.capture(model, gather_loss, batch, passes=[PASS])
    step(batch)
    gather_loss(expected, batch).backward()
    report = report_of(step)
    assert (report.matched, report.changed) == (1, 0) and report.notes[0].endswith(why)
    assert torch.equal(model.weight.grad, expected.weight.grad)


def test_a_gpu_runs_it_inside_compiled_pieces_and_cuda_graphs():
    with FakeTensorMode():
        grad, index = torch.zeros(6, 4, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
        graph = make_fx(lambda *given: embedding_backward(*given, 9, -1))(grad, index).graph
    (node,) = graph.find_nodes(op="call_function", target=AFTER)
    assert needs_host(node) is None and adds_in_any_order(node) is None and not is_mutating(node)


def test_no_embedding(tools):
    step = tools.trace(tools.Tower(p=0.0), tools.mse, tools.vectors(6, 12)[0])
    (report,) = run_passes(step, [PASS])
    assert report.matched == 0 and "found nothing to do" in report.line()


def test_needs_a_gpu_by_default():
    step = stepgraph.capture(nn.Embedding(8, 16), lookup_loss, lookups(), passes=[]).graph
    with pytest.raises(ValueError, match="pass embedding_gradient cannot run: the step has no CUDA tensors"):
        run_passes(step, ["embedding_gradient"])


def test_place_in_the_pipeline():
    names = [p.name for p in configured()]
    assert names.index("fuse_loss") < names.index("embedding_gradient") < names.index("expand_optimizer")
    assert "embedding_gradient" not in [p.name for p in configured("exact")]


@pytest.mark.slow  # Inductor's C++ compiler
def test_inductor_calls_it_from_within_its_piece(tools):
    model, batch = nn.Embedding(8, 16), lookups(20_000)
    expected = copy.deepcopy(model)
    lookup_loss(expected, batch).backward()
    step = stepgraph.capture(model, lookup_loss, batch, passes=[PASS, "inductor"])
    step(batch)
    first = model.weight.grad.clone()
    torch.testing.assert_close(first, expected.weight.grad, rtol=1e-4, atol=1e-3)  # sums of 2500 numbers up to 4
    model.zero_grad()
    step(batch)
    assert torch.equal(model.weight.grad, first)
    assert tools.called(step) == ["compiled"]
    assert not [note for report in step.report for note in report.notes if "left to eager" in note]

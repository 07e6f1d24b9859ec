"""Clean-up changes what it names, and leaves alone what a write, an output or a user's tensor forbids."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture import Provenance, set_provenance
from stepgraph.passes import PassReport, run_passes
from stepgraph.passes.contract import PASSES
from tests.passes.recorded import wrong_values

aten = torch.ops.aten
CLEANUP = ["fold_constants", "remove_noop_views", "dedupe_casts", "dead_code"]
X = torch.arange(24.0).view(4, 6) / 7 - 1


def check(tools, function, passes, *inputs):
    """(targets left, reports), after checking that results and inputs are as before."""
    inputs = inputs or (X,)
    step = tools.by_hand(function, *inputs)
    reports = tools.check_same(step, inputs, passes)
    return tools.targets(step), reports


# Views


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().t() * 1,
        lambda x: x.view(4, 6) * 1,
        lambda x: x.detach() * 1,
        lambda x: x.expand(4, 6) * 1,
        lambda x: x.view(2, 12).view(4, 6) * 1,
        lambda x: x.transpose(0, 1)[:].transpose(0, 1) * 1,
    ],
)
def test_views_that_change_nothing_go(tools, function):
    targets, reports = check(tools, function, ["remove_noop_views", "dead_code"])
    assert targets == [aten.mul.Tensor]
    assert reports[0].changed >= 1 and reports[0].nodes_after < reports[0].nodes_before


def test_views_that_change_something_stay(tools):
    def function(x):
        z = torch.complex(x, x + 1)
        return x.t() * 1, x[1:3] * 1, x.view(6, 4) * 1, torch.view_as_real(z.conj() * 1)

    step = tools.by_hand(function, X)
    before = tools.targets(step)
    reports = tools.check_same(step, [X], ["remove_noop_views"])
    assert tools.targets(step) == before and reports[0].changed == 0 and reports[0].matched > 3


def test_conjugate_of_the_conjugate_goes(tools):
    def function(x):
        z = torch.complex(x, x + 1)
        return torch.view_as_real(z.conj().conj() * 1)

    targets, _ = check(tools, function, ["remove_noop_views", "dead_code"])
    assert aten._conj.default not in targets


def test_input_is_not_returned_itself(tools):
    step = tools.by_hand(lambda x: (x.detach(),), X)
    run_passes(step, CLEANUP)
    (result,) = step.module(X)
    assert result is not X and result.data_ptr() == X.data_ptr()


def test_view_is_seen_through_later_writes(tools):
    def function(x):
        h = x * 1
        same = h.view(4, 6)
        h.mul_(2)
        same[0] = 5.0
        return same + 0, h + 0

    targets, _ = check(tools, function, ["remove_noop_views"])
    assert aten.view.default not in targets


def test_tensor_reshaped_in_place_stands_for_no_other(tools):
    def function(x):
        h = x * 1
        row, same = h[0], h[0]
        other = h.view(4, 6)
        row.unsqueeze_(0)
        h.t_()
        return row * 1, same * 1, other * 1, h * 1

    check(tools, function, CLEANUP)


# Casts


def test_repeated_casts_and_views_are_made_once(tools):
    def function(x):
        return x.double() * x.double(), x.t() @ x, x.t() + 1

    targets, reports = check(tools, function, ["dedupe_casts"])
    assert targets.count(aten._to_copy.default) == 1 and targets.count(aten.t.default) == 1
    assert reports[0].changed == 2


def test_casts_are_repeated_in_another_phase(tools):
    step = tools.by_hand(lambda x: x.double() * x.double(), X)
    second = [n for n in step.nodes() if n.target is aten._to_copy.default][1]
    set_provenance(second, Provenance("", "backward", ""))
    tools.check_same(step, [X], ["dedupe_casts"])
    assert tools.targets(step).count(aten._to_copy.default) == 2


@pytest.mark.parametrize("narrow, wide", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")])
def test_return_from_a_wider_type_goes(tools, narrow, wide):
    narrow, wide = getattr(torch, narrow), getattr(torch, wide)
    targets, _ = check(tools, lambda x: x.to(wide).to(narrow) + 1, ["dedupe_casts", "dead_code"], X.to(narrow))
    assert targets == [aten.add.Tensor]


@pytest.mark.parametrize(
    "start, between", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16"), ("int64", "float32")]
)
def test_return_from_a_type_that_rounds_stays(tools, start, between):
    start, between = getattr(torch, start), getattr(torch, between)
    targets, _ = check(tools, lambda x: x.to(between).to(start) + 1, ["dedupe_casts"], (X * 1e5 + 1).to(start))
    assert targets.count(aten._to_copy.default) == 2


def write_cast_copy(x):
    copy = x.to(torch.float32, copy=True)
    copy[0] = 9.0
    return copy + 0, x + 0


def write_source_after_cast(x):
    h = x * 1
    first = h.double()
    h[1] = 3.0
    return first + 0, h.double() + 0


def write_source_of_a_copy(x):
    h = x * 1
    copy = h.to(torch.float32, copy=True)
    h.view(-1)[2] = 4.0
    return copy + 0, h + 0


def write_cast_between_by_a_view(x):
    h = (x * 1).bfloat16()
    wide = h.float()
    wide.view(-1)[3] = 7.0
    return wide.bfloat16() + 0, h + 0


def write_input_at_the_end(x):
    copy = x.to(torch.float32, copy=True)
    x.add_(1)
    return copy + 0


def write_chunks(x):
    h = x * 1
    a, b = h.unsafe_chunk(2)
    first = h.double()
    a.sigmoid_()
    return b + 0, first + 0, h.double() + 0


def index_put_and_fill(x):
    h = x * 1
    first = h.bfloat16()
    h.index_put_((torch.tensor([0]),), torch.tensor(3.0))
    second = h.bfloat16()
    h.masked_fill_(h > 0, -1.0)
    return first + 0, second + 0, h.bfloat16() + 0


@pytest.mark.parametrize(
    "function",
    [
        write_cast_copy, write_source_after_cast, write_source_of_a_copy, write_cast_between_by_a_view,
        write_input_at_the_end, write_chunks, index_put_and_fill,
    ],
)  # fmt: skip
def test_copies_apart_by_a_write_stay(tools, function):
    step = tools.by_hand(function, X)
    copies = tools.targets(step).count(aten._to_copy.default)
    tools.check_same(step, [X], ["dedupe_casts"])
    assert tools.targets(step).count(aten._to_copy.default) == copies
    tools.check_same(step, [X], CLEANUP)


def test_returned_copies_stay_apart(tools):
    step = tools.by_hand(lambda x: (x.to(torch.float32, copy=True), x.to(torch.float32, copy=True)), X)
    run_passes(step, CLEANUP)
    a, b = step.module(X)
    assert len({a.data_ptr(), b.data_ptr(), X.data_ptr()}) == 3


# Constants


class Literals(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.table = table

    def forward(self, x):
        literal = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).to(torch.float32)
        written = torch.tensor([0.0, 0.0, 0.0])
        written += 1
        return (self.w * literal * x["x"] * self.table["t"].float() + written).sum()


def test_literals_are_folded_and_a_users_tensor_is_read_live():
    table = {"t": torch.full((3,), 2.0, dtype=torch.float64)}
    batch = {"x": torch.ones(3)}
    step = stepgraph.capture(Literals(table), lambda m, b: m(b), batch, passes=CLEANUP)
    fold = step.report[0]
    assert (fold.matched, fold.changed) == (3, 2)  # the literal and its cast; the one written to stays
    assert [step(batch).item() for _ in range(2)] == [15.0, 15.0]
    table["t"].fill_(3.0)
    assert step(batch).item() == 21.0


def test_a_literal_that_fills_is_passed_as_a_number():
    """As where labels are shifted to the right: on a GPU the host would fill, between two CUDA graphs."""

    def loss_fn(model, batch):
        shifted = torch.zeros_like(batch["x"])
        shifted[:, 1:] = batch["x"][:, :-1]
        shifted[:, 0] = 3
        shifted[:, 1] = torch.tensor(0.1, dtype=torch.float64)
        return model(shifted).square().sum()

    model, batch = nn.Linear(4, 2), {"x": torch.randn(3, 4)}
    expected = loss_fn(model, batch)
    step = stepgraph.capture(model, loss_fn, batch, passes=CLEANUP)
    assert torch.equal(step(batch), expected.detach())
    targets = [node.target for node in step.graph.graph.nodes]
    assert targets.count(torch.ops.aten.fill_.Scalar) + targets.count(torch.ops.aten.fill.Scalar) == 2
    assert torch.ops.aten.fill_.Tensor not in targets


# Dead code


def test_unused_nodes_go_and_effects_stay(tools):
    def function(x):
        torch.exp(x).sum()
        torch.rand_like(x)  # moves the generator
        h = x * 1
        h.add_(1)
        aten._assert_async(h.sum() > -1e9)
        return x * 2

    targets, reports = check(tools, function, ["dead_code"])
    assert aten.exp.default not in targets and aten.sum.default in targets
    assert {aten.rand_like.default, aten.add_.Tensor, aten._assert_async.default} <= set(targets)
    assert reports[0].changed == 2


def test_nothing_to_do_is_said(tools):
    step = tools.by_hand(lambda x: x * 2, X)
    lines = [report.line() for report in run_passes(step, "exact")]
    for line in lines[:4]:
        assert "found nothing to do" in line and "nodes 1 (+0)" in line
    assert "0 unused nodes removed" in lines[4]


# Gradients of indexing


def gradient_of_indexing(w, i, j, g):
    leaf = w.detach().requires_grad_()
    rows = leaf[i, :, j]
    (gradient,) = torch.autograd.grad(rows, leaf, g)
    return rows.detach(), gradient


def index_gradients(step):
    """The pass, which otherwise needs a GPU."""
    report = PassReport("index_gradients", "exact")
    PASSES["index_gradients"].apply(step, None, report)
    step.module.recompile()
    return report


def test_gradients_of_an_indexing_check_nothing_again(tools):
    inputs = torch.randn(5, 3, 4), torch.tensor([0, 4, 4, 1]), torch.tensor([[3, 0, 0, 3]]), torch.randn(1, 4, 3)
    step = tools.by_hand(gradient_of_indexing, *inputs, phase="backward")
    report = index_gradients(step)
    assert (report.matched, report.changed) == (1, 1) and not wrong_values(step)
    assert aten.index_put.default not in tools.targets(step)
    for ours, eager in zip(step.module(*inputs), gradient_of_indexing(*inputs), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_unchecked_indices_stay_checked(tools, phase):
    """A model's own ``index_put``, and one whose indices, or whose size, forward has not read with."""

    def function(x, i, j, g):
        zeros = torch.zeros_like(x)
        small = torch.zeros_like(x[:2]).index_put([i], g, accumulate=True)
        return x[i], zeros.index_put([j], g, accumulate=True), small, zeros.index_put([i], g)

    inputs = X, torch.tensor([0, 1]), torch.tensor([1, 1]), torch.ones(2, 6)
    step = tools.by_hand(function, *inputs, phase=phase)
    assert index_gradients(step).changed == 0
    assert tools.targets(step).count(aten.index_put.default) == 3

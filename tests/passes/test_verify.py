"""After every pass, what is recorded of each node follows from its inputs; a pass that breaks that is named."""

import operator

import pytest
import torch
from torch import nn

from stepgraph.passes import Pass, configured, run_passes
from stepgraph.passes.contract import NoOptions
from stepgraph.passes.verify import InconsistentGraph, RecordedValues
from tests.passes.recorded import wrong_values

aten = torch.ops.aten
X = torch.arange(24.0).view(4, 6) / 7 - 1


def wrong(apply):
    return Pass("wrong", "exact", lambda step, options, report: apply(step), "leaves wrong values", NoOptions())


def node_of(step, target):
    return next(n for n in step.nodes() if n.target is target)


def test_what_capture_records_follows(tools, case):
    assert wrong_values(tools.prepared(case)[1].step) == []


@pytest.mark.parametrize("memory", ["selective", "full"])
def test_what_passes_record_follows(tools, case, memory):
    step = tools.copied(tools.prepared(case)[1].step)
    run_passes(step, configured(memory=memory, inductor="off"))
    assert wrong_values(step) == []


def chunk_of_a_chunk(x):
    top, bottom = x.chunk(2, 0)
    left, right = top.chunk(2, 1)
    return left - right, bottom + 1


def test_a_chunk_that_stands_for_a_chunk_of_it(tools):
    """The mistake of a pass that takes all views of several tensors for equal."""

    def apply(step):
        outer, inner = (n for n in step.nodes() if n.target is aten.split.Tensor)
        inner.replace_all_uses_with(outer)
        step.graph.erase_node(inner)

    step = tools.by_hand(chunk_of_a_chunk, X)
    with pytest.raises(InconsistentGraph) as error:
        run_passes(step, ["dead_code", wrong(apply)])
    assert str(error.value) == (
        "pass wrong left node getitem_2, <built-in function getitem>(split, 0), with a recorded value that does not "
        "follow from its inputs: recorded is float32[2, 3] with strides (6, 1) on cpu, from its inputs follows "
        "float32[2, 6] with strides (6, 1) on cpu"
    )


def reads_another_shape(step):
    node_of(step, aten.mul.Tensor).update_arg(0, step.placeholders()[0])


def takes_a_part_that_is_not_there(step):
    node_of(step, operator.getitem).update_arg(1, 2)


def has_an_operator_that_refuses(step):
    node_of(step, aten.mul.Tensor).target = aten.mm.default


def changes_an_argument(step):
    node_of(step, aten.t.default).target = aten.sum.default


def records_another_type(step):
    node = node_of(step, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].to(torch.float64)


def records_other_strides(step):
    node = node_of(step, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].contiguous()


def records_nothing(step):
    del node_of(step, aten.mul.Tensor).meta["val"]


def records_fewer(step):
    node = node_of(step, aten.split.Tensor)
    node.meta["val"] = node.meta["val"][:1]


@pytest.mark.parametrize(
    "apply, node, message",
    [
        (reads_another_shape, "mul", r"recorded is float32\[6, 2\].* follows float32\[4, 6\]"),
        (takes_a_part_that_is_not_there, "getitem", "follows nothing, since .* there is no part 2"),
        (has_an_operator_that_refuses, "mul", "follows nothing, since its operator refuses them"),
        (changes_an_argument, "t", r"follows float32\[\] with"),
        (records_another_type, "mul", r"recorded is float64\[6, 2\].* follows float32\[6, 2\]"),
        (records_other_strides, "mul", r"strides \(2, 1\) .* follows .* strides \(1, 6\)"),
        (records_nothing, "mul", r"recorded is None, from its inputs follows float32\[6, 2\]"),
        (records_fewer, "split", r"recorded is \[float32.*\], from its inputs follows \[float32.*, float32.*\]"),
    ],
)
def test_a_wrong_pass_is_named(tools, apply, node, message):
    def function(x):
        top, _ = x.split(2)
        return (top.t() * 2,)

    step = tools.by_hand(function, X)
    with pytest.raises(InconsistentGraph, match=message) as error:
        run_passes(step, ["fold_constants", wrong(apply)])
    assert str(error.value).startswith(f"pass wrong left node {node}, ")


def test_a_wrong_constant(tools):
    def apply(step):
        constant = next(n for n in step.graph.nodes if n.op == "get_attr")
        setattr(step.module, constant.target, torch.zeros(2, 2))
        constant.meta["val"] = node_of(step, aten.mul.Tensor).meta["val"]

    model = nn.Linear(2, 2)
    table = torch.ones(3, 2)
    step = tools.trace(model, lambda m, b: (m(b["x"]) * table).sum(), {"x": torch.ones(3, 2)})
    with pytest.raises(InconsistentGraph, match=r"recorded is float32\[3, 2\].* follows float32\[2, 2\]"):
        run_passes(step, [wrong(apply)])


def test_readers_of_another_value_are_checked(tools):
    """A pass that gives a node another operator and the value of that, and forgets who reads it."""

    def apply(step):
        node = node_of(step, aten.exp.default)
        node.target, node.kwargs = aten._to_copy.default, {"dtype": torch.float64}
        node.meta["val"] = node.meta["val"].to(torch.float64)

    step = tools.by_hand(lambda x: (x.exp().neg(),), X)
    with pytest.raises(InconsistentGraph, match=r"node neg, .* follows float64\[4, 6\]"):
        run_passes(step, [wrong(apply)])


def test_the_check_changes_nothing(tools):
    """Operators that reshape in place, and random ones, are evaluated without a trace."""

    def function(x):
        h = x * 1
        row = h[0]
        row.unsqueeze_(0)
        h.t_()
        torch.nn.functional.dropout(h, 0.5)
        return row * 1, h * torch.rand_like(h), torch.randperm(4)

    def apply(step):
        for node in step.nodes():
            node.args = (*node.args,)

    step = tools.by_hand(function, X)
    before, state = step.text(), torch.get_rng_state()
    run_passes(step, [wrong(apply)])
    assert step.text() == before and torch.equal(torch.get_rng_state(), state)
    assert wrong_values(step) == []


def test_what_capture_recorded_wrongly_is_no_pass_fault(tools):
    def copies(step):
        node = node_of(step, aten.mul.Tensor)
        with step.graph.inserting_after(node):
            copy = step.graph.node_copy(node)
        node.replace_all_uses_with(copy)

    step = tools.by_hand(lambda x: (x.t() * 2,), X)
    node = node_of(step, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].contiguous()
    assert len(wrong_values(step)) == 1
    run_passes(step, [wrong(copies)])
    with pytest.raises(InconsistentGraph):
        run_passes(step, [wrong(records_another_type)])


def test_work_is_linear_in_depth(tools, monkeypatch):
    """Every node that a pass made is looked at once, and layers of one form are evaluated as one."""
    looked, evaluated = [], []
    follows, evaluate = RecordedValues._follows, RecordedValues._evaluate
    monkeypatch.setattr(RecordedValues, "_follows", lambda self, node: looked.append(node) or follows(self, node))
    monkeypatch.setattr(RecordedValues, "_evaluate", lambda self, node: evaluated.append(node) or evaluate(self, node))
    counts = []
    for layers in (6, 12, 24):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(layers)))
        step = tools.trace(model, lambda m, b: m(b["x"]).square().mean(), {"x": X})
        looked.clear(), evaluated.clear()
        run_passes(step, configured(memory="full", inductor="off"))
        counts.append((len(looked), len(evaluated)))
    (few, once), (more, again), (most, still) = counts
    assert few > 0 and most - more <= 2 * (more - few)
    assert once == again == still > 0

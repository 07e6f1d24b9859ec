"""Excerpts of what a pass changed, on graphs changed by hand."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.graph.edit import Builder, replace
from stepgraph.graph.provenance import Provenance, set_provenance
from stepgraph.graph.step_graph import StepGraph
from stepgraph.passes.excerpts import Changes, _out_of_order

aten = torch.ops.aten


def step_of(function, *shapes):
    module = make_fx(function, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes))
    for node in module.graph.nodes:
        set_provenance(node, Provenance("block", "forward", "model.py:1"))
    return StepGraph(module, [], [])


def only(step, target):
    return step.graph.find_nodes(op="call_function", target=target)


def test_nothing_changed():
    step = step_of(lambda x: x.sin().cos(), (2,))
    changes = Changes(step)
    for node in step.graph.nodes:  # an equal call in new objects is no change
        node.args = fx.map_arg(node.args, lambda n: n)
    assert changes.excerpts() == [] == changes.excerpts()


def test_equal_replacements_are_one_form_with_their_readers():
    step = step_of(lambda x, y: x.sin() * y.sin(), (2,), (2,))
    changes = Changes(step)
    for node in only(step, aten.sin.default):
        replace(node, Builder(node, before=node)(aten.cos.default, node.args[0]))
    (found,) = changes.excerpts()
    assert found.count == 2 and found.where == "block" and not found.moved
    assert [line.split(" = ")[1].split("(")[0] for line in found.before] == ["aten.sin", "aten.mul.Tensor"]
    assert [line.split(" = ")[1].split("(")[0] for line in found.after] == ["aten.cos", "aten.mul.Tensor"]
    assert "mul.Tensor(sin, sin_1)" in found.before[1] and "mul.Tensor(cos_default, cos_default_1)" in found.after[1]
    assert changes.excerpts() == []  # seen


def test_a_rewritten_call_is_shown_as_it_was():
    """The text of before is of the call then, although the node is the same."""
    step = step_of(lambda x: x.sin().cos(), (2,))
    changes = Changes(step)
    (node,) = only(step, aten.sin.default)
    node.target = aten.sin_.default
    (found,) = changes.excerpts()
    assert "aten.sin(" in found.before[0] and "aten.sin_(" in found.after[0]


def test_erased_nodes_keep_their_arguments():
    step = step_of(lambda x: x.sin().cos(), (2,))
    dead = Builder(only(step, aten.sin.default)[0], before=only(step, aten.cos.default)[0])
    new = dead(aten.exp.default, only(step, aten.sin.default)[0])
    changes = Changes(step)
    step.graph.erase_node(new)
    (found,) = changes.excerpts()
    assert found.after == [] and found.before[0].startswith("exp_default: float32[2] = aten.exp(sin)")


def test_a_node_that_moves():
    step = step_of(lambda x: (x.sin(), x.cos(), x.exp(), x.tan()), (2,))
    changes = Changes(step)
    (sin,), (tan,) = only(step, aten.sin.default), only(step, aten.tan.default)
    tan.append(sin)
    (found,) = changes.excerpts()
    assert found.moved and found.count == 1
    assert "aten.sin" in found.before[0] and "aten.sin" in found.after[-1]


def test_long_changes_are_cut():
    def function(x):
        for _ in range(40):
            x = x.sin()
        return x.cos()

    step = step_of(function, (2,))
    changes = Changes(step)
    first = only(step, aten.sin.default)[0].args[0]
    only(step, aten.cos.default)[0].args = (first,)
    step.graph.eliminate_dead_code()
    (found,) = changes.excerpts()
    assert len(found.before) == 15 and found.before[-1] == "... 27 more" and len(found.after) == 1


@given(st.permutations(range(9)))
def test_the_fewest_moves(numbers):
    moved = _out_of_order(numbers)
    kept = [n for i, n in enumerate(numbers) if i not in moved]
    assert kept == sorted(kept)
    longest = len(kept) + 1
    assert not any(list(c) == sorted(c) for c in itertools.combinations(numbers, longest))

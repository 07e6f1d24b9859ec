"""Gradients that accumulators hold: the update's graph takes them as inputs, and may write over them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from stepgraph.capture import InputSpec
from stepgraph.graph.marks import COMPILE
from stepgraph.graph.values import Accumulator, BatchLeaf, GroupValue, OptimizerState, Parameter
from stepgraph.passes import get, run_passes

aten = torch.ops.aten
EXPAND = replace(get("expand_optimizer"), needs_cuda=False)  # on a GPU it pays; its arithmetic is the same here
ADAMW = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SHAPES = ((4, 6), (5,))
STATE = partial(OptimizerState, key="state")


def update_graph(tools, function, inputs, kinds):
    """``function`` as the update's graph, with an input of each of ``kinds``."""
    step = tools.by_hand(function, *inputs, phase="optimizer")
    step.inputs[:] = [InputSpec(kind(f"layer.{i}.weight")) for i, kind in enumerate(kinds)]
    return step


def clip(x, y, p):
    norm = torch.stack([x.norm(), y.norm()]).norm()
    a, b = aten._foreach_mul.Tensor([x, y], (1 / norm).clamp(max=1.0))
    p.sub_(a * 0.1).sub_(b)
    return [norm]


def clip_one_by_one(x, y, p):
    p.sub_((x * 0.5) * 0.1).sub_(y * 0.5)
    return [p.norm()]


def clip_and_return(x, y, p):
    a, b = aten._foreach_mul.Tensor([x, y], p.norm())
    p.sub_(a).sub_(b)
    return [x, y.view(-1)]


def clip_and_read_later(x, y, p):
    a, b = aten._foreach_mul.Tensor([x, y], p.norm())
    p.sub_(a).sub_(b)
    return [x.view(-1).norm()]


def clip_parameters(x, y, p):
    a, b = aten._foreach_mul.Tensor([p, x], y.norm())
    return [a + b]


@pytest.mark.parametrize(
    "function, in_place, left",
    [(clip, 2, 0), (clip_and_return, 0, 2), (clip_and_read_later, 1, 1), (clip_parameters, 1, 1)],
)
def test_accumulators_are_clipped_where_they_lie(tools, function, in_place, left):
    inputs = [torch.randn(4, 6) for _ in range(3)]
    step = update_graph(tools, function, inputs, (Accumulator, Accumulator, Parameter))
    expected, given = ([t.clone() for t in inputs] for _ in range(2))
    results = [t.clone() for t in step.module(*expected)]
    run_passes(step, ["inplace_update"])
    counts = {n.target: len(n.args[0]) for n in step.nodes() if "foreach" in str(n.target)}
    assert counts.get(aten._foreach_mul_.Tensor, 0) == in_place
    assert counts.get(aten._foreach_mul.Tensor, 0) == left
    tools.compare([dict(enumerate([*results, expected[2]]))], [dict(enumerate([*step.module(*given), given[2]]))])


def test_single_operators_write_over_accumulators_too(tools):
    inputs = [torch.randn(4, 6) for _ in range(3)]
    step = update_graph(tools, clip_one_by_one, inputs, (Accumulator, Accumulator, Parameter))
    expected, given = ([t.clone() for t in inputs] for _ in range(2))
    step.module(*expected)
    run_passes(step, ["inplace_update"])
    x, y, _ = step.placeholders()
    written = [n.args[0] for n in step.nodes() if n.target is aten.mul_.Tensor]
    assert written[0] is x and written[-1] is y and aten.mul.Tensor not in tools.targets(step)
    step.module(*given)
    assert torch.equal(expected[2], given[2])


def test_inputs_of_other_kinds_are_never_scratch(tools):
    inputs = [torch.randn(4, 6) for _ in range(3)]
    step = update_graph(tools, clip, inputs, (Parameter, BatchLeaf, Parameter))
    (report, *_) = tools.check_same(step, inputs, ["inplace_update"])
    assert aten._foreach_mul_.Tensor not in tools.targets(step) and aten._foreach_mul.Tensor in tools.targets(step)
    assert report.changed < report.matched


def adamw(*flat):
    """Clipping and fused AdamW on two parameters: (parameters, accumulators, moments, squares, steps, lr)."""
    params, grads, exp_avgs, exp_avg_sqs, steps, (lr,) = (list(flat[i : i + 2]) for i in range(0, 11, 2))
    norm = torch.stack([aten.linalg_vector_norm.default(g) for g in grads]).norm()
    clipped = aten._foreach_mul.Tensor(grads, (0.1 / norm).clamp(max=1.0))
    aten._fused_adamw_.tensor_lr(params, clipped, exp_avgs, exp_avg_sqs, [], steps, lr=lr, **ADAMW)
    return [norm]


def adamw_that_returns_gradients(*flat):
    return [*adamw(*flat), flat[2], flat[3].view(-1)]


@pytest.mark.parametrize("function, clipped_in_place", [(adamw, True), (adamw_that_returns_gradients, False)])
def test_expansion_takes_the_clipping_of_accumulators_with_it(tools, function, clipped_in_place):
    kinds = [kind for kind in (Parameter, Accumulator, STATE, STATE) for _ in SHAPES]
    inputs = [torch.randn(shape) for _ in range(4) for shape in SHAPES]
    inputs[6:8] = [t.abs() for t in inputs[6:8]]
    inputs += [torch.tensor(3.0), torch.tensor(3.0), torch.tensor(1e-2)]
    step = update_graph(tools, function, inputs, [*kinds, STATE, STATE, GroupValue])
    expected, given = ([t.clone() for t in inputs] for _ in range(2))
    results = step.module(*expected)
    run_passes(step, ["inplace_update", EXPAND])
    accumulators = step.placeholders(Accumulator)
    scaled = [n for n in step.nodes() if n.target is aten.mul.Tensor and n.args[0] in accumulators]
    assert all(n.meta[COMPILE] for n in scaled) and len(scaled) == (2 if clipped_in_place else 0)
    assert (aten._foreach_mul.Tensor in tools.targets(step)) != clipped_in_place
    assert aten._foreach_mul_.Tensor not in tools.targets(step)
    torch.testing.assert_close(step.module(*given), results, rtol=0, atol=0)
    for i in (0, 1, 4, 5, 6, 7):  # all but the accumulators
        torch.testing.assert_close(given[i], expected[i], rtol=1e-5, atol=1e-6)
        assert not torch.equal(given[i], inputs[i])

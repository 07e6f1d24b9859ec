"""A norm's result is computed again from what the norm saves, with the same bits."""

import operator

import pytest
import torch

from stepgraph.graph.edit import Builder
from stepgraph.lower import StepSpec, lower
from stepgraph.models import Llama3, next_token_loss
from stepgraph.passes import StepOptions, Target
from stepgraph.passes.memory.norms import apart, joined
from stepgraph.passes.memory.recompute import Plan
from tests.passes.memory.test_fit import TINY


def step_of(dtype):
    """A captured step of a Llama whose norms add the residual, and tensors for its inputs."""
    torch.manual_seed(0)
    model = Llama3(TINY).to(dtype)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    ids = torch.randint(64, (4, 64))
    spec = StepSpec(
        model,
        next_token_loss,
        {"tokens": ids, "targets": ids.roll(1)},
        passes=StepOptions(inductor="off", norm="kernel"),
    )
    step = lower(spec, Target("cpu")).program.main
    given = [*model.parameters(), *model.buffers(), ids, ids.roll(1)]
    shapes = [node.meta["val"].shape for node in step.placeholders()]
    assert [value.shape for value in given] == shapes
    return step, [value.detach() for value in given]


def run(step, given):
    return torch.fx.Interpreter(step.module).run(*[value.clone() for value in given])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_are_the_same(dtype):
    step, given = step_of(dtype)
    before = [value.clone() for value in run(step, given)]
    made = apart(step)
    assert made and all(map(torch.equal, before, run(step, given)))
    plan = Plan(step)
    again = [node for node in made if node in plan.saved and plan.block[node]]
    assert len(again) == 3 and plan.rewrite(plan.full()) and not any(node.users for node in again)
    assert all(map(torch.equal, before, run(step, given)))


def test_what_is_kept_stays_as_it_was():
    step, _ = step_of(torch.bfloat16)
    text = str(step.graph)
    made = apart(step)
    assert str(step.graph) != text
    joined(made)
    assert str(step.graph) == text


def test_a_result_that_is_written_in_place_is_left():
    """Even through a view that nothing in backward reads: what is recomputed would lack the write."""
    step, _ = step_of(torch.bfloat16)
    norms = step.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.norm.default)
    for norm in norms:
        y = next(user for user in norm.users if user.target is operator.getitem and user.args[1] == 0)
        build = Builder(y, after=y)
        build(torch.ops.aten.mul_.Tensor, build(torch.ops.aten.slice.Tensor, y, -1, 0, 4), 1.5)
    assert norms and not apart(step)


@pytest.mark.parametrize("place, value", [(2, None), (5, "layer")])
def test_other_norms_are_left(place, value):
    """With a bias, or about a mean, the kernel adds, and a compiler might join that to a product."""
    step, _ = step_of(torch.bfloat16)
    for norm in step.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.norm.default):
        args = list(norm.args)
        args[place] = args[1] if place == 2 else value
        norm.args = tuple(args)
    assert not apart(step)

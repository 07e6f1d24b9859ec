"""Without an optimizer gradients land in ``param.grad`` as ``backward()`` leaves them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph

PASSES = pytest.mark.parametrize("passes", [[], "exact"])


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pair():
    return {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}


@PASSES
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_they_add_to_what_is_there(passes, accumulate):
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    twin = copy.deepcopy(model)
    batches = [pair() for _ in range(3)]
    step = stepgraph.capture(twin, mse, batches[0], accumulate=accumulate, passes=passes)
    assert all(p.grad is None for p in twin.parameters())  # capturing computes nothing
    for batch in batches:
        for k in range(accumulate):
            (mse(model, {key: t.chunk(accumulate)[k] for key, t in batch.items()}) / accumulate).backward()
        expected, grads = [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]
        step(batch)
        if accumulate == 1:  # else eager adds microbatch by microbatch to what is there, the step their sum
            assert all(map(torch.equal, expected, [p.grad for p in twin.parameters()]))
        torch.testing.assert_close(expected, [p.grad for p in twin.parameters()])
        assert all(old is None or old is p.grad for old, p in zip(grads, twin.parameters(), strict=True))


@PASSES
def test_no_two_share_memory(passes):
    """Autograd hands out one tensor for both terms of a sum."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            return self.a + self.b + x

    model = Sum()
    batch = pair()
    stepgraph.capture(model, mse, batch, passes=passes)(batch)
    expected = model.b.grad.clone()
    assert torch.equal(model.a.grad, expected)
    model.a.grad.zero_()
    assert torch.equal(model.b.grad, expected)


class Echo(torch.autograd.Function):
    """Its gradient is a tensor of the batch itself."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x, None


@PASSES
def test_they_are_no_view_of_the_batch(passes):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4))
    x = torch.randn(4)
    kept = x.clone()
    step = stepgraph.capture(model, lambda m, x: Echo.apply(m.weight, x), x, passes=passes)
    step(x)
    step(x)
    assert torch.equal(x, kept)
    assert torch.equal(model.weight.grad, 2 * x)


@PASSES
def test_custom_function_with_saved_tensors(passes, check_training):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return Cube.apply(self.linear(x))

    step = check_training(Model(), mse, [pair()], max_grad_norm=0.1, passes=passes)
    assert {n.meta["stepgraph"].source.split(":")[0] for n in step.graph.nodes("forward")} == {__file__}


@torch.library.custom_op("stepgraph_tests::double_sine", mutates_args=())
def double_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(2 * torch.sin(x).numpy())


@double_sine.register_fake
def _(x):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


double_sine.register_autograd(lambda ctx, grad: 2 * grad * torch.cos(ctx.saved_tensors[0]), setup_context=_setup)


@PASSES
def test_custom_operator_with_autograd(passes, check_training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return double_sine(self.linear(x))

    step = check_training(
        Model(), mse, [pair()], lambda m: torch.optim.AdamW(m.parameters(), fused=True), passes=passes
    )
    assert any(n.target is torch.ops.stepgraph_tests.double_sine.default for n in step.graph.nodes("forward"))


def test_second_model_without_gradients_is_a_constant(check_training):
    """A frozen teacher closed over by the loss, whose parameters do not take part in backward."""
    teacher = nn.Linear(6, 6)

    def distill(model, batch):
        with torch.no_grad():
            target = teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), target)

    check_training(nn.Linear(6, 6), distill, [pair()])

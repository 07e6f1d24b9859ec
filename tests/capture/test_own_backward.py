"""A ``torch.autograd.Function`` that computes its forward again in backward and runs ``backward()`` itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph import CaptureError


class Again(torch.autograd.Function):
    """A module without activations: backward computes them again, and gives the module's parameters gradients."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run, ctx.name = run, "again"  # in place of the autograd node's name()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


class Stack(nn.Module):
    """``plan``: a letter for each call of the inner layer, plain (p), by `Again` (a), or nested in one (n)."""

    def __init__(self, plan, inner=None, dropout=0.0):
        super().__init__()
        self.first, self.plan, self.dropout = nn.Linear(6, 6), plan, dropout
        self.inner = inner or [nn.Linear(6, 6)]
        if inner is None:
            self.layers = nn.ModuleList(self.inner)

    def run(self, x):
        return F.dropout(self.inner[0](x), self.dropout)

    def forward(self, x):
        x = self.first(x)
        for kind in self.plan:
            nested = lambda x: torch.tanh(Again.apply(self.run(x), self.run))  # noqa: E731
            x = self.run(x) if kind == "p" else Again.apply(torch.tanh(x), nested if kind == "n" else self.run)
        return x


def loss_fn(model, x):
    return model(x).square().mean()


def check(model, outside=None, **options):
    """Five steps of SGD leave eager's bits, in ``outside`` too, whose gradients no optimizer takes."""
    twin, own = copy.deepcopy(model), copy.deepcopy(outside)
    if outside is not None:
        twin.inner = [own]
    step = stepgraph.capture(
        twin, loss_fn, torch.randn(4, 6), torch.optim.SGD(twin.parameters(), 0.1), passes="exact", **options
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(5):
        x = torch.randn(4, 6)
        torch.manual_seed(seed)
        optimizer.zero_grad()
        for part in x.chunk(options.get("accumulate", 1)):
            (loss_fn(model, part) / options.get("accumulate", 1)).backward()
        optimizer.step()
        torch.manual_seed(seed)
        step(x)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for a, b in zip(outside.parameters(), own.parameters(), strict=True) if outside is not None else ():
        assert a.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("plan", ["a", "pap", "aaa", "apa", "n", "na"])
def test_its_gradients_are_added_in_eagers_order(plan):
    torch.manual_seed(0)
    check(Stack(plan))


def test_it_draws_other_random_numbers_in_backward():
    check(Stack("aa", dropout=0.5))


def test_microbatches():
    check(Stack("a"), accumulate=2)
    with pytest.raises(CaptureError, match=r"module layers\.0 gets 2 gradients from calls of backward.*accumulate=1"):
        check(Stack("ap"), accumulate=2)
    stepgraph.capture(
        Stack("ap"), loss_fn, torch.randn(4, 6), accumulate=2, passes=stepgraph.StepOptions(inductor="off")
    )


def test_a_module_outside_of_the_model():
    outside = nn.Linear(6, 6)
    check(Stack("a", [outside]), outside)

"""``torch.utils.checkpoint`` calls inside a captured model: the same bits as eager, dropout included."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import stepgraph
from stepgraph.errors import CaptureError
from stepgraph.graph.provenance import provenance

PASSES = pytest.mark.parametrize("passes", [[], "exact"])
FLAVOURS = pytest.mark.parametrize("use_reentrant", [False, True])


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs():
    return [{"x": torch.randn(4, 12), "y": torch.randn(4, 12)} for _ in range(2)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(12, 24), nn.Linear(24, 12), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.dropout(self.up(x)))))


class Stack(nn.Module):
    def __init__(self, run, dropout=0.2):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.run = run

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


@PASSES
@FLAVOURS
@pytest.mark.parametrize("make_optimizer", [adamw, None])
def test_with_dropout(check_training, passes, use_reentrant, make_optimizer):
    model = Stack(functools.partial(checkpoint, use_reentrant=use_reentrant))
    step = check_training(model, mse, pairs(), make_optimizer, max_grad_norm=0.5, passes=passes, accumulate=2)
    calls = {provenance(n).checkpoint for n in step.graph.nodes("forward")}
    assert calls == {None, *range(3)}


@PASSES
@FLAVOURS
def test_nested(check_training, passes, use_reentrant):
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    step = check_training(Stack(lambda block, x: run(run, block, x)), mse, pairs(), passes=passes)
    assert {provenance(n).checkpoint for n in step.graph.nodes("forward")} == {None, 0, 1, 2}


@FLAVOURS
def test_sequential(check_training, use_reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tower = nn.Linear(12, 12), nn.Sequential(Block(0.1), Block(0.1), Block(0.1))

        def forward(self, x):
            return checkpoint_sequential(self.tower, 2, self.first(x), use_reentrant=use_reentrant)

    check_training(Model(), mse, pairs(), adamw)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@FLAVOURS
def test_without_an_input_that_requires_a_gradient(check_training, use_reentrant):
    """The re-entrant flavour then gives the block no gradient at all."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = Block(0.0), nn.Linear(12, 12)

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=use_reentrant))

    step = check_training(Model(), mse, pairs())
    names = {s.name.split(".")[0] for s in step.graph.outputs if s.kind == "grad"}
    assert names == ({"last"} if use_reentrant else {"block", "last"})


def test_recomputation_takes_place(check_training):
    step = check_training(Stack(functools.partial(checkpoint, use_reentrant=False), dropout=0.0), mse, pairs(), adamw)
    again = [n for n in step.graph.nodes("backward") if "recomputes" in n.meta]
    assert sum(n.target is torch.ops.aten.gelu.default for n in again) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_other_random_numbers_in_backward_are_refused(check_training, use_reentrant):
    run = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    with pytest.raises(CaptureError, match=r"blocks.0.dropout \(.*\) draws random numbers.*preserve_rng_state=True"):
        stepgraph.capture(Stack(run), mse, pairs()[0], passes="exact")
    check_training(Stack(run, dropout=0.0), mse, pairs(), adamw, steps=2)  # nothing is drawn

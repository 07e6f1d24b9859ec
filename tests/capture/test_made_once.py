"""Models that make a table in their first call and read it in later ones: captured as after one call, or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from tests.capture.conftest import check_training


class Table(nn.Module):
    """``make(module, x)`` gives a table, which ``keep`` keeps where ``kept`` finds it; None: nowhere yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.length, self.cached = None, None
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.frequencies = 1.0 / (100 ** (torch.arange(8) / 8))  # neither a parameter nor a buffer
        self.tables = {}

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.outer(torch.arange(x.size(-2)).type_as(self.frequencies), self.frequencies).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.given(x))


class InAttribute(Table):
    """The rotary embedding of many hand-written models."""

    def given(self, x):
        if x.size(-2) != self.length:
            self.length = x.size(-2)
            self.cached = self.made(x).bfloat16()
        return self.cached[None]


class InBuffer(Table):
    def given(self, x):
        if self.table is not None and self.table.size(0) >= x.size(-2):
            return self.table[: x.size(-2)]
        self.register_buffer("table", self.made(x) * self.scale, persistent=False)
        return self.table


class InDictionary(Table):
    def given(self, x):
        if x.size(-2) not in self.tables:
            self.tables[x.size(-2)] = self.made(x)
        return self.tables[x.size(-2)]


class WrittenInPlace(Table):
    """A mask of fairseq, which ``to`` gives back as it is."""

    def given(self, x):
        if self.cached is None or self.cached.size(0) < x.size(-2):
            self.cached = torch.triu(torch.zeros(x.size(-2), x.size(-2)).fill_(0.25), 1)
        self.cached = self.cached.to(x)
        return self.cached[:, :1] + 1


class OfBatch(Table):
    """A scale that the first batch decides, as a data-dependent initialization."""

    def given(self, x):
        if self.cached is None:
            self.cached = x.detach().std()
        return self.cached


class OfParameter(Table):
    def given(self, x):
        if self.cached is None:
            self.cached = self.linear.weight.detach().norm()
        return self.cached


class OfMovingBuffer(Table):
    def given(self, x):
        if self.cached is None:
            self.cached = self.scale * 2
        self.scale.mul_(0.9)
        return self.cached


class Drawn(Table):
    def given(self, x):
        if self.cached is None:
            self.cached = torch.rand(8)
        return self.cached


class FirstDiffers(Table):
    def given(self, x):
        if self.cached is None:
            self.cached = self.made(x)
            return self.cached * 2
        return self.cached


class WrittenLater(Table):
    def given(self, x):
        if self.cached is None:
            self.cached = self.made(x)
        else:
            self.cached.mul_(0.5)
        return self.cached


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.dropout(model(batch), 0.1).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("kind", [InAttribute, InBuffer, InDictionary, WrittenInPlace])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_as_eager(kind: type, accumulate: int):
    class Batches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind()

        def forward(self, x: dict) -> torch.Tensor:
            return self.inner(x["x"])

    batches = [{"x": torch.randn(2, 6, 8)} for _ in range(3)]
    loss = lambda m, b: F.dropout(m(b), 0.1).square().mean()  # noqa: E731
    step = check_training(Batches(), loss, batches, adamw, accumulate=accumulate, steps=4)
    assert "cos" not in step.graph.text() and "triu" not in step.graph.text()


def test_the_model_is_left_as_after_a_call():
    model, x = InAttribute(), torch.randn(2, 6, 8)
    called = copy.deepcopy(model)
    called(x)
    step = stepgraph.capture(model, loss_fn, x, adamw(model), passes="exact")
    assert model.length == 6 and torch.equal(model.cached, called.cached)
    step(x)
    longer = torch.randn(2, 9, 8)  # a table of its own, as in eager
    assert step.verify(longer).bitwise
    step(longer)
    assert step.verify(x).bitwise


@pytest.mark.parametrize("kind", [OfBatch, OfParameter, OfMovingBuffer, Drawn, FirstDiffers, WrittenLater])
def test_others_are_refused_and_leave_the_model_as_it_was(kind: type):
    model, x = kind(), torch.randn(2, 6, 8)
    with pytest.raises(stepgraph.CaptureError, match=r"cached|neither its parameter nor its buffer") as caught:
        stepgraph.capture(model, loss_fn, x, adamw(model), passes="exact")
    assert "\n" not in str(caught.value)
    assert model.cached is None and model.length is None and model.table is None


def test_arrays_of_what_is_known():
    """`.numpy()` of lengths, which cannot be written."""

    def loss(model: nn.Module, batch: dict) -> torch.Tensor:
        lengths = batch["lengths"].cpu().numpy()
        mask = torch.arange(int(lengths.max()))[None] < torch.as_tensor(lengths)[:, None]
        return (model(batch["x"]) * mask[..., None]).square().sum()

    batches = [{"x": torch.randn(2, 5, 8), "lengths": torch.tensor([5, 2 + i])} for i in range(2)]
    check_training(nn.Linear(8, 8), loss, batches, adamw, steps=3)

    def writing(model: nn.Module, batch: dict) -> torch.Tensor:
        batch["lengths"].numpy()[0] = 3
        return loss(model, batch)

    with pytest.raises(ValueError, match="read-only"):
        stepgraph.capture(nn.Linear(8, 8), writing, batches[0], passes="exact")


class Quantizer(nn.Module):
    """As vector_quantize_pytorch: a moving average that asks for a gradient, and a zero that forward makes require
    one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        update = y.detach().mean((0, 1))
        if self.average.grad is not None:
            update.add_(self.average.grad)
            self.average.grad = None
        self.average.data.lerp_(update, 0.1)
        loss = self.zero
        loss.requires_grad_()
        return loss + (y - self.average).square().mean()


def test_a_buffer_that_is_asked_for_its_gradient_and_one_that_is_made_to_require_one():
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, x = Quantizer(), torch.randn(2, 6, 8)
        optimizer = adamw(model)
        step = stepgraph.capture(model, lambda m, b: m(b), x, optimizer, passes="exact") if captured else None
        for _ in range(3):
            if step is None:
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                step(x)
        runs.append(model)
    assert runs[1].zero.requires_grad and torch.equal(runs[0].zero.grad, runs[1].zero.grad)
    for a, b in zip(runs[0].state_dict().values(), runs[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    runs[1].average.grad = torch.ones(8)
    with pytest.raises(stepgraph.CaptureError, match=r"uses \.grad of a parameter"):
        step(x)


@pytest.mark.parametrize("error", [AssertionError, KeyError, KeyboardInterrupt])
def test_an_error_of_the_users_own_in_a_later_trace_leaves_model_and_optimizer_as_they_were(error: type):
    model, calls = Quantizer(), []
    optimizer = adamw(model)

    def failing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        loss = model(x)
        if len(calls) > 1:
            raise error("after the trace in which zero was found to require a gradient")
        return loss

    with pytest.raises(error):
        stepgraph.capture(model, failing, torch.randn(2, 6, 8), optimizer, passes="exact")
    assert not model.zero.requires_grad and not optimizer.state

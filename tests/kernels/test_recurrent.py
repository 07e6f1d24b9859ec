"""Recurrent layers on a CPU: bits of eager, and the workspace that oneDNN's backward reads."""

import itertools

import pytest
import torch
from torch import nn

from stepgraph import compat
from stepgraph.kernels import recurrent
from tests.capture.conftest import check_training


class Model(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(6, 8, **options)
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def square(model, batch):
    return model(batch["x"]).square().mean()


def train(model, passes="exact", **options):
    batches = [{"x": torch.randn(4, 5, 6)} for _ in range(2)]
    model(batches[0]["x"])  # the head learns its width
    return check_training(
        model, square, batches, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3), passes=passes, steps=3, **options
    )


LSTMS = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in itertools.product([1, 2], [False, True], [False, True], [False, True])
]


@pytest.mark.parametrize("options", LSTMS, ids=str)
def test_lstm(options):
    train(Model(nn.LSTM, **options), max_grad_norm=0.1)


@pytest.mark.parametrize("passes", [[], "exact"])
@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.3}, {"proj_size": 4}], ids=str)
def test_lstm_with_dropout_and_projections(options, passes):
    train(Model(nn.LSTM, **options), passes)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_layers(kind):
    train(Model(kind, num_layers=2), accumulate=2)


@pytest.mark.parametrize("grad", [True, False])
def test_a_frozen_layer_runs_in_the_gradient_mode_of_eager(grad):
    """On some processors oneDNN rounds otherwise where it writes no workspace."""

    class Frozen(Model):
        def forward(self, x):
            with torch.set_grad_enabled(grad):
                rows = self.rnn(x)[0]
            return self.head(rows)

    model = Frozen(nn.LSTM)
    model.rnn.requires_grad_(False)
    found = train(model).graph.graph.find_nodes(op="call_function", target=torch.ops.stepgraph.rnn_layer.default)
    assert len(found) == grad


def test_the_fake_operator_gives_what_the_real_one_does():
    options = (False, [], 2, 8, 1, True, False, False, True)
    for length, batch, dtype in itertools.product([1, 5], [1, 3, 16], [torch.float32]):
        tensors = [torch.randn(*shape, dtype=dtype) for shape in ((length, batch, 6), (32, 6), (32, 8), (32,), (32,))]
        states = [torch.randn(1, batch, 8, dtype=dtype) for _ in range(2)]
        real = recurrent.rnn_layer(tensors[0], tensors[1:], *states, *options)
        with compat.FakeTensorMode(allow_non_fake_inputs=True):
            fake = recurrent.rnn_layer(tensors[0], tensors[1:], *states, *options)
        forms = [(t.shape, t.stride(), t.dtype) for t in real]
        assert forms == [(t.shape, t.stride(), t.dtype) for t in fake]
        assert real[3].numel() > 0


@pytest.mark.parametrize("options", [{"batch_first": True}, pytest.param({"num_layers": 2}, marks=pytest.mark.long)])
def test_lstm_under_inductor(options):
    """Compiled around it: loss and gradients stay close to eager's. oneDNN's backward reads its input as contiguous."""
    import stepgraph

    model, batch = Model(nn.LSTM, **options), {"x": torch.randn(4, 5, 6)}
    model(batch["x"])
    step = stepgraph.capture(model, square, batch)
    expected = square(model, batch)
    torch.testing.assert_close(step(batch), expected.detach())
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(grads, [p.grad for p in model.parameters()])

"""Captured training is bitwise equal to eager, for every kind of model a step may hold."""

import dataclasses
import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.models import Llama3, Llama3Config, next_token_loss

TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=61, max_seq_len=32)
PASSES = [[], "exact"]
DTYPES = [torch.float32, torch.bfloat16]


def tokens(n=3, batch=4, length=16, vocab=61):
    ids = torch.randint(vocab, (n, batch, length + 1))
    return [{"tokens": i[:, :-1].contiguous(), "targets": i[:, 1:].contiguous()} for i in ids]


def pairs(n=3, batch=4, width=12):
    return [{"x": torch.randn(batch, width), "y": torch.randn(batch, width)} for _ in range(n)]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


fused_adamw = functools.partial(adamw, fused=True)


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, None], ids=["unfused", "fused", "none"])
def test_llama(check_training, passes, dtype, make_optimizer):
    step = check_training(
        Llama3(TINY).to(dtype), next_token_loss, tokens(), make_optimizer, max_grad_norm=0.5, passes=passes
    )
    assert step.metrics["grad_norm"] > 0.5  # clipping took place


@pytest.mark.parametrize("passes", PASSES)
def test_tied_weights(check_training, passes):
    config = dataclasses.replace(TINY, tie_embeddings=True, n_layers=1)
    check_training(Llama3(config), next_token_loss, tokens(), fused_adamw, max_grad_norm=1.0, passes=passes)


@pytest.mark.parametrize("passes", PASSES)
def test_weights_tied_between_modules(check_training, passes):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids).tanh())

    step = check_training(Tied(), next_token_loss, tokens(), adamw, passes=passes)
    assert [s.what.name for s in step.graph.inputs if s.what.kind == "parameter"] == ["embed.weight"]


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_norm_buffers(check_training, passes, accumulate):
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 12))
    check_training(model, mse, pairs(), adamw, passes=passes, accumulate=accumulate)


class RunningMean(nn.Module):
    """Reassigns one buffer and writes another in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.linear(x) - self.mean
        self.mean = self.mean * 0.9 + 0.1 * y.detach().mean(0)
        self.count += 1
        return y * self.count


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_reassigned_buffer(check_training, passes, accumulate):
    model = nn.Sequential(RunningMean(), nn.ReLU(), RunningMean())
    check_training(model, mse, pairs(), fused_adamw, passes=passes, accumulate=accumulate)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout(check_training, passes, accumulate):
    model = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 12), nn.Dropout(0.1))
    check_training(model, mse, pairs(), adamw, passes=passes, accumulate=accumulate)


@pytest.mark.parametrize("passes", PASSES)
def test_autocast_in_the_loss(check_training, passes):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(model, batch)

    model = Llama3(dataclasses.replace(TINY, n_layers=1))
    step = check_training(model, loss_fn, tokens(), fused_adamw, max_grad_norm=1.0, passes=passes, accumulate=2)
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in step.graph.nodes("forward"))


def test_autocast_casts_a_weight_once(check_training):
    """Gradients of its uses are then added up in bf16; a trace would switch that cache off."""

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch["x"])
            with torch.autocast("cpu", enabled=False):
                y = model(y.float())
            return model(y).float().sin().mean()

    check_training(torch.nn.Linear(6, 6), loss_fn, [{"x": torch.randn(4, 6)}], fused_adamw, accumulate=2, steps=2)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(check_training, passes, dtype):
    def make_optimizer(model):
        return stepgraph.MasterAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    model = Llama3(dataclasses.replace(TINY, n_layers=1)).to(dtype)
    step = check_training(model, next_token_loss, tokens(), make_optimizer, max_grad_norm=1.0, passes=passes)
    names = {s.what.name.rpartition(".")[2] for s in step.graph.inputs if s.what.kind == "optimizer"}
    assert names == {"step", "exp_avg", "exp_avg_sq", "master"}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(("accumulate", "make_optimizer"), [(2, None), (4, fused_adamw)])
def test_accumulation(check_training, passes, accumulate, make_optimizer):
    model = Llama3(dataclasses.replace(TINY, n_layers=1))
    check_training(
        model, next_token_loss, tokens(), make_optimizer, max_grad_norm=1.0, passes=passes, accumulate=accumulate
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder(check_training, dropout):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    batches = [{"x": torch.randn(4, 6, 16), "y": torch.randn(4, 6, 16)} for _ in range(2)]
    check_training(model, mse, batches, adamw, max_grad_norm=1.0)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_frozen_transformer_encoder(check_training, gradients):
    """Without gradients torch's layers call one operator, unless they have hooks or think that they are traced."""
    model = nn.ModuleDict({"student": nn.Linear(8, 8), "other": nn.MultiheadAttention(8, 2, batch_first=True).eval()})
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model["teacher"] = nn.TransformerEncoder(layer, 2).eval()
    for name in ("teacher", "other"):
        model[name].requires_grad_(False)

    def loss_fn(model, batch):
        with torch.set_grad_enabled(gradients):
            wanted = model["teacher"](batch["x"])
            wanted = wanted + model["other"](wanted, wanted, wanted, need_weights=False)[0]
        return (model["student"](batch["x"]) - wanted).square().mean()

    step = check_training(model, loss_fn, [{"x": torch.randn(2, 6, 8)} for _ in range(3)])
    counts = Counter(str(node.target).split(".")[1] for node in step.graph.nodes() if "." in str(node.target))
    assert counts["_transformer_encoder_layer_fwd"] == 2 and counts["_native_multi_head_attention"] == 1


def test_convolutions_in_channels_last(check_training):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
    model = model.to(memory_format=torch.channels_last)
    batches = [{"x": torch.randn(4, 3, 6, 6), "y": torch.randn(4, 3, 6, 6)} for _ in range(2)]
    check_training(model, mse, batches, fused_adamw, max_grad_norm=0.1)


class OddGradients(nn.Module):
    """Parameters whose gradients autograd returns in other layouts than theirs, expanded, or shared."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(7, 12).t())
        self.read_transposed = nn.Parameter(torch.randn(12, 7))
        self.a, self.b = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.joined = nn.Parameter(torch.randn(2, 12))
        self.summed = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        y = x @ self.transposed @ self.read_transposed.t().contiguous()
        z = (y.unsqueeze(1) + torch.cat([self.joined, (self.a + self.b)[None]])).sum(1)
        return z * 0.1 + self.summed.sum()


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("make_optimizer", [adamw, fused_adamw, None], ids=["unfused", "fused", "none"])
@pytest.mark.parametrize("norm", [None, 0.3])
def test_gradients_in_odd_layouts(check_training, passes, make_optimizer, norm):
    check_training(OddGradients(), mse, pairs(), make_optimizer, max_grad_norm=norm, passes=passes)


def test_two_runs_with_one_seed_are_equal():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.3), nn.Linear(32, 12))
        batches = pairs()
        step = stepgraph.capture(model, mse, batches[0], adamw(model), passes="exact")
        losses = [step(batches[i % 3]) for i in range(10)]
        results.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *results))


class Swap(nn.Module):
    """Assigns one buffer to another before it replaces it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("now", torch.zeros(12))
        self.register_buffer("before", torch.zeros(12))

    def forward(self, x):
        y = self.linear(x) + self.now - self.before
        self.before = self.now
        self.now = y.detach().mean(0)
        return y


@pytest.mark.parametrize("passes", PASSES)
def test_buffers_that_take_each_others_values(check_training, passes):
    check_training(Swap(), mse, pairs(), adamw, passes=passes)


class DataWriter(nn.Module):
    """Clamps a parameter through ``.data`` and reads through it, as vector-quantized models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return self.linear(x) + self.linear.bias.data


def test_writes_through_data(check_training):
    check_training(DataWriter(), mse, pairs(), adamw)

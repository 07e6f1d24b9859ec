"""What modules do once a step: in the graph, bitwise as an eager loop that calls `stepgraph.end_of_step`."""

import copy

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.models import next_token_loss
from stepgraph.passes import configured
from tests.models.moe_models import DEEPSEEK, KINDS, our_model, tokens_for


class Counted(nn.Module):
    """Counts what forward sees and forgets it at the end of the step; keeps a mean of its weight by assignment."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("mean", torch.zeros(6, 6))
        self.register_buffer("idle", torch.zeros(2))
        self.rate = 0.5

    def forward(self, x):
        self.seen.add_(x.detach().sum(dim=0))
        return self.inner(x + 0.01 * self.mean.sum(dim=0))

    @torch.no_grad()
    def end_of_step(self):
        self.mean = self.mean + self.rate * (self.inner.weight - self.mean)  # the weight behind its update
        total = self.seen.sum()
        self.seen.zero_()
        return {"seen": total, "mean": self.mean}


def toy():
    torch.manual_seed(0)
    return nn.Sequential(Counted(), nn.Tanh(), Counted(), nn.Linear(6, 1))


def toy_loss(model, x):
    return model(x).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def eager(model, optimizer, loss_fn, parts):
    """(loss, metrics) of a plain loop."""
    total = 0
    for part in parts:
        loss = loss_fn(model, part) / len(parts)
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total, stepgraph.end_of_step(model)


def same(one, other):
    tensors = dict(other.named_parameters()) | dict(other.named_buffers())
    for name, value in (*one.named_parameters(), *one.named_buffers()):
        assert torch.equal(value, tensors[name]), name


@pytest.mark.parametrize("parts", [1, 3])
def test_it_runs_once_a_step_behind_the_update(parts):
    model, twin = toy(), toy()
    optimizer, twins = adamw(model), adamw(twin)
    x = torch.randn(6, 6)
    step = stepgraph.capture(model, toy_loss, x, optimizer, accumulate=parts, passes="exact")
    for i in range(3):
        x = torch.randn(6, 6)
        loss = step(x)
        expected, metrics = eager(twin, twins, toy_loss, list(x.chunk(parts)))
        assert torch.equal(loss, expected)
        assert step.metrics.keys() == metrics.keys() == {f"{i}.{name}" for i in (0, 2) for name in ("seen", "mean")}
        assert all(torch.equal(step.metrics[name], value) for name, value in metrics.items())
        same(model, twin)
        kept, now = step.metrics["0.mean"], model[0].mean.clone()
        step(x)
        assert torch.equal(kept, now) and not torch.equal(kept, model[0].mean), "a metric is not a view of the buffer"
        eager(twin, twins, toy_loss, list(x.chunk(parts)))
    model[0].rate = twin[0].rate = 0.25
    with pytest.warns(UserWarning, match=r"0\.rate changed from 0\.5 to 0\.25"):
        step(x)
    eager(twin, twins, toy_loss, list(x.chunk(parts)))
    same(model, twin)
    assert step.verify(x).bitwise


def test_without_an_optimizer_it_is_the_callers():
    model = toy()
    x = torch.randn(6, 6)
    step = stepgraph.capture(model, toy_loss, x, passes="exact")
    step(x)
    assert torch.equal(model[0].seen, x.sum(dim=0))
    stepgraph.end_of_step(model)
    assert not model[0].seen.any()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_left_out_leaves_it_out(parts):
    model = toy()
    x = torch.randn(4, 6)
    options = {"max_grad_norm": 1.0, "accumulate": parts, "on_nonfinite": "skip", "passes": "exact"}
    step = stepgraph.capture(model, toy_loss, x, adamw(model), **options)
    step(x)
    before = copy.deepcopy(model)
    step(torch.full_like(x, torch.inf))
    assert bool(step.metrics["skipped"])
    same(model, before)
    step(x)
    assert not step.metrics["skipped"] and not torch.equal(model[0].mean, before[0].mean)


def test_what_it_returns_is_checked():
    model = toy()
    model[0].__class__ = type("Wrong", (Counted,), {"end_of_step": lambda self: self.seen.sum()})
    with pytest.raises(stepgraph.CaptureError, match=r"end_of_step of 0 returned .*Tensor; return a dict of tensors"):
        stepgraph.capture(model, toy_loss, torch.randn(4, 6), adamw(model), passes="exact")


def moe_batch(config, seed=0):
    tokens = torch.cat([tokens_for(config, seq_len=17, seed=seed), tokens_for(config, seq_len=17, seed=seed + 99)])
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def check_moe(config, parts, memory="none", prepare=lambda model: None):
    """Some steps of a model, captured and in a plain loop, bit for bit; the captured step."""
    model, twin = our_model(config), our_model(config)
    prepare(model)
    optimizer, twins = adamw(model), adamw(twin)
    options = configured("exact", memory=memory)
    step = stepgraph.capture(model, next_token_loss, moe_batch(config), optimizer, accumulate=parts, passes=options)
    for i in range(2):
        batch = moe_batch(config, seed=i)
        loss = step(batch)
        cut = [{key: value.chunk(parts)[k] for key, value in batch.items()} for k in range(parts)]
        expected, metrics = eager(twin, twins, next_token_loss, cut)
        assert torch.equal(loss, expected)
        assert torch.equal(step.metrics["expert_load"], metrics["expert_load"])
        same(model, twin)
        biases = torch.stack(
            [router.expert_bias for router in model.routers if router.expert_bias is not None] or [loss]
        )
        assert biases.isfinite().all()
    return step


CI = ("deepseek", "qwen-not-normalized-tied")


@pytest.mark.parametrize(
    "kind", [*CI, *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in CI)]
)
def test_models_are_bitwise_eager(kind):
    step = check_moe(KINDS[kind], parts=1)
    assert (step.metrics["expert_load"] >= 1).all()


@pytest.mark.parametrize(("memory", "parts"), [("full", 3), ("selective", 1)])
def test_recomputation_counts_no_token_twice(memory, parts):
    step = check_moe(DEEPSEEK, parts, memory=memory)
    assert any("recomputes" in node.meta for node in step.graph.nodes("backward"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_counts_no_token_twice(reentrant):
    def prepare(model):
        for block in model.layers:
            block.forward = _checkpointed(block.forward, reentrant)

    check_moe(DEEPSEEK, parts=2, prepare=prepare)


def _checkpointed(forward, reentrant):
    return lambda *args: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=reentrant)

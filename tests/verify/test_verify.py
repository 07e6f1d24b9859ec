"""`step.verify` says what eager says, and leaves nothing behind."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stepgraph
from stepgraph import compat
from stepgraph.passes.contract import NoOptions, Pass

aten = torch.ops.aten


class Keeps(nn.Module):
    """A buffer that forward replaces, one that it writes, and a length that it keeps in Python."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.length = None

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        self.steps += 1
        self.length = x.shape[0]
        return x + self.mean


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "layer norm": lambda: nn.LayerNorm(6),
    "keeps": Keeps,
    "gelu": nn.GELU,
}
OPTIMIZERS = {
    "none": lambda model: None,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "MasterAdamW": lambda model: stepgraph.MasterAdamW(model.parameters(), lr=0.01),
    "AdamW of a part": lambda model: torch.optim.AdamW(model[0].parameters(), lr=torch.tensor(0.01), fused=True),
}


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pair(n=4):
    return {"x": torch.randn(n, 6), "y": torch.randn(n, 6)}


def build(*kinds):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *(LAYERS[kind]() for kind in kinds))


def everything(model, optimizer, batch):
    """Whatever a step could change: values, and which objects hold them."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            found["attribute", path, key] = id(value)
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *batch.items()]:
        found["tensor", name] = (id(tensor), tensor.data_ptr(), tensor.detach().clone())
        if tensor.grad is not None:
            found["grad", name] = (id(tensor.grad), tensor.grad.clone())
    if optimizer:
        found["group"] = [dict(group) for group in optimizer.param_groups]
        for i, (param, entries) in enumerate(optimizer.state.items()):
            found["state", i] = (id(param), id(entries))
            for key, value in entries.items():
                found["state", i, key] = (id(value), value.clone())
    found["random"] = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), max_size=4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    accumulate=st.sampled_from([1, 2]),
    max_grad_norm=st.sampled_from([None, 0.1]),
    before=st.integers(0, 2),
    backward=st.booleans(),
)
def test_exact_is_bitwise_and_everything_is_put_back(kinds, optimizer, accumulate, max_grad_norm, before, backward):
    model, batch = build(*kinds), pair()
    made = OPTIMIZERS[optimizer](model)
    step = stepgraph.capture(
        model, mse, batch, made, passes="exact", accumulate=accumulate, max_grad_norm=max_grad_norm
    )
    for _ in range(before):
        step(pair())
    if backward:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
    metrics, program = step.metrics, step.program
    kept = everything(model, made, batch)
    report = step.verify(batch)
    assert report.bitwise and report.close and report.largest is None, str(report)
    assert report.loss[0] == report.loss[1]
    assert report.compared["parameter"] == len(list(model.parameters()))
    assert same(kept, everything(model, made, batch))
    assert step.metrics is metrics and step.program is program
    if made:
        model.zero_grad()  # a step refuses what its update would leave out
    before_call = copy.deepcopy(model)
    assert step(batch).isfinite()
    assert not made or any(
        not torch.equal(a, b) for a, b in zip(before_call.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("optimizer", ["none", "AdamW", "MasterAdamW"])
def test_training_goes_on_as_if_nothing_had_been(optimizer):
    """A run that verifies between its steps ends with the bits of one that does not."""
    models = [build("dropout", "batch norm", "keeps") for _ in range(2)]
    batches = [pair() for _ in range(3)]
    for model, verifies in zip(models, (False, True), strict=True):
        step = stepgraph.capture(model, mse, batches[0], OPTIMIZERS[optimizer](model), passes="exact")
        torch.manual_seed(1)
        for batch in batches:
            if verifies:
                assert step.verify(batch).bitwise
            step(batch)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)


def test_verify_before_the_first_step_and_of_another_shape():
    model = build("dropout")
    step = stepgraph.capture(model, mse, pair(), torch.optim.AdamW(model.parameters()), passes="exact")
    assert step.verify(pair(7)).bitwise
    assert len(str(step.verify(pair()))) < 400


def scaled(target, tier="numerics"):
    """A pass that multiplies what the first node of ``target`` gives by 1 + 2^-10."""

    def apply(step, options, report):
        node = next((node for node in step.graph.nodes if node.target is target), None)
        if node is None:  # the graph of an update
            return
        with step.graph.inserting_after(node):
            new = step.graph.call_function(aten.mul.Tensor, (node, 1.0009765625))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        report.matched = report.changed = 1

    return Pass("scaled", tier, apply, "scales", NoOptions())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_pass_that_changes_a_number_is_found(accumulate):
    model, batch = build("gelu", "linear"), pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    passes = ["remove_noop_views", scaled(aten.gelu.default), "inplace_update"]
    step = stepgraph.capture(model, mse, batch, optimizer, max_grad_norm=9.0, passes=passes, accumulate=accumulate)
    kept = everything(model, optimizer, batch)
    report = step.verify(batch, locate=True)
    assert same(kept, everything(model, optimizer, batch))
    assert not report.bitwise and not report.close and report.repeats
    found = {(d.kind, d.name): d for d in report.differences}
    assert ("loss", "loss") in found and ("metric", "grad_norm") in found
    assert ("optimizer", "2.weight.exp_avg") in found and ("parameter", "2.weight") in found
    assert ("batch", "batch.0") not in found and ("random state", "cpu") not in found
    assert "they differ with the pass scaled (numerics)" in report.parted
    assert "aten.mul.Tensor, forward of 1" in report.parted and "(test_verify.py:" in report.parted
    assert report.parted in str(report) and len(str(report).splitlines()) < 12
    assert "LOSS OR METRICS BEYOND" in str(report)


def test_the_sizes_of_a_difference_are_those_of_the_tensors():
    model, batch = build("gelu", "linear"), pair()
    twin = copy.deepcopy(model)
    step = stepgraph.capture(model, mse, batch, passes=[scaled(aten.gelu.default)])
    report = step.verify(batch)
    mse(twin, batch).backward()
    step(batch)
    wanted = {
        name: ((a.grad - b.grad).abs().max().item(), int((a.grad != b.grad).sum()), a.grad.abs().max().item())
        for (name, a), b in zip(twin.named_parameters(), model.parameters(), strict=True)
    }
    found = {d.name: d for d in report.differences if d.kind == "gradient"}
    assert found.keys() == {name for name, (_, n, _) in wanted.items() if n}
    for name, difference in found.items():
        largest, elements, magnitude = wanted[name]
        assert (difference.elements, difference.size) == (elements, dict(twin.named_parameters())[name].numel())
        assert difference.largest == pytest.approx(largest, rel=1e-6)
        assert difference.relative == pytest.approx(largest / magnitude, rel=1e-6)
    assert report.largest.relative == max(d.relative for d in report.differences)


SCALE = {"loss": 2.0}


def test_a_global_that_changed_since_the_capture_is_taken(monkeypatch):
    model, batch = build(), pair()
    step = stepgraph.capture(model, lambda m, b: mse(m, b) * SCALE["loss"], batch, passes="exact")
    assert step.verify(batch).bitwise
    monkeypatch.setitem(SCALE, "loss", 3.0)
    with pytest.warns(UserWarning, match=r"SCALE changed from \{'loss': 2.0\} to \{'loss': 3.0\}"):
        assert step.verify(batch).bitwise


class Rounds(torch.autograd.Function):
    """Eager and the trace part: what it gives depends on whether the tensor is fake."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.25 if compat.is_fake(x) else x * 1.5

    @staticmethod
    def backward(ctx, grad):
        return grad


class Odd(nn.Module):
    def forward(self, x):
        return Rounds.apply(x)


def test_a_capture_that_is_wrong_itself_is_found():
    model, batch = nn.Sequential(nn.Linear(6, 6), Odd()), pair()
    report = stepgraph.capture(model, mse, batch, passes="exact").verify(batch, locate=True)
    assert "they differ in the capture itself" in report.parted
    assert "mul.Tensor, forward of 1 (test_verify.py:" in report.parted


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_loss_that_differs_is_not_blamed_on_the_update(optimizer):
    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return (x if compat.is_fake(x) else y).clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, grad

    def loss_fn(model, batch):
        y = model(batch["x"])
        return Swap.apply(y.sum(), (y * 2).sum())

    model = build()
    given = () if optimizer is None else (optimizer(model.parameters(), lr=0.1),)
    report = stepgraph.capture(model, loss_fn, pair(), *given, passes="exact").verify(pair(), locate=True)
    assert "every value of forward and backward is one that eager has too" in report.parted


def test_eager_that_does_not_repeat_itself_is_told(tmp_path):
    count = tmp_path / "count"
    count.write_text("1")

    def loss_fn(model, batch):
        count.write_text(count.read_text() + "1")  # no capture watches files
        return mse(model, batch) * len(count.read_text())

    report = stepgraph.capture(build(), loss_fn, pair(), passes="exact").verify(pair(), locate=True)
    assert not report.repeats and report.parted is None
    assert "eager does not reproduce itself" in str(report)


def test_a_step_that_writes_into_its_batch():
    def loss_fn(model, batch):
        batch["x"].mul_(2)
        return mse(model, batch)

    batch = {"x": torch.randn(4, 1).expand(4, 6).clone(), "y": torch.randn(6, 4).t()}
    kept = {key: value.clone() for key, value in batch.items()}
    report = stepgraph.capture(build(), loss_fn, batch, passes="exact").verify(batch)
    assert report.bitwise and all(torch.equal(kept[key], batch[key]) for key in kept)


def test_a_failing_eager_step_leaves_everything_as_it_was():
    def loss_fn(model, batch):
        if not compat.is_fake(batch["x"]):
            model[1].mean.add_(5)
            raise RuntimeError("only on shapes")
        return mse(model, batch)

    model, batch = build("keeps"), pair()
    optimizer = torch.optim.AdamW(model.parameters())
    step = stepgraph.capture(model, loss_fn, batch, optimizer, passes="exact")
    kept = everything(model, optimizer, batch)
    with pytest.raises(RuntimeError, match="only on shapes"):
        step.verify(batch)
    assert same(kept, everything(model, optimizer, batch))


def test_autocast_around_verify_is_refused():
    step = stepgraph.capture(build(), mse, pair(), passes="exact")
    with torch.autocast("cpu"), pytest.raises(stepgraph.CaptureError, match="autocast is on around"):
        step.verify(pair())


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_gradients_of_two_accumulated_steps_add_up(max_grad_norm):
    """What lands in ``param.grad`` is no memory of the step's own, which the next one clears."""
    model = build()
    twin, batches = copy.deepcopy(model), [pair(), pair()]
    step = stepgraph.capture(model, mse, batches[0], passes="exact", accumulate=2, max_grad_norm=max_grad_norm)
    wanted = []
    for batch in batches:
        step(batch)
        twin.zero_grad()
        for k in range(2):
            (mse(twin, {key: value.chunk(2)[k] for key, value in batch.items()}) / 2).backward()
        if max_grad_norm:
            nn.utils.clip_grad_norm_(twin.parameters(), max_grad_norm)
        wanted.append([p.grad.clone() for p in twin.parameters()])
    for param, first, second in zip(model.parameters(), *wanted, strict=True):
        assert torch.equal(param.grad, first + second)

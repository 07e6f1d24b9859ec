"""What optimizers compute element by element, marked for Inductor: the same updates, in few kernels."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture import gradients
from stepgraph.graph.facts import is_mutating
from stepgraph.graph.marks import COMPILE
from stepgraph.passes import get

aten = torch.ops.aten
PASSES = [replace(get(name), needs_cuda=False) for name in ("orthogonalize", "inplace_update", "fuse_updates")]


class Averaging(torch.optim.Optimizer):
    """Calls ``update(p, average, lr)`` for each parameter, with a state that begins as zeros."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def zeros(self, p):
        return torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["average"] = self.zeros(p)
                self.update(p, self.state[p]["average"], group["lr"])


class Lion(Averaging):
    """As its authors wrote it: the state is written after it is read, in place."""

    def update(self, p, average, lr):
        p.mul_(1 - lr * 0.1)
        update = average.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
        p.add_(update, alpha=-lr)
        average.mul_(0.99).add_(p.grad, alpha=0.01)


class Tangled(torch.optim.Optimizer):
    """Writes into views, into what it reads under other names, and from one parameter's state into another's."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            last = None
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["average"] = torch.zeros_like(p)
                average = self.state[p]["average"]
                scratch = p.grad.clone()
                other = scratch.t() if p.ndim == 2 else scratch
                scratch.mul_(2.0)
                average.copy_(other.t() if p.ndim == 2 else other)
                average[:3].add_(1.0)
                p.sub_(average, alpha=group["lr"])
                rows = p[1:]
                p.mul_(0.99)
                rows.add_(rows.sum() * 1e-3)
                if last is not None and last.shape == average.shape:
                    average.copy_(last)
                    last.add_(0.5)
                last = average


class Parts(Averaging):
    """Writes parts of what it computed and copied, into states that lie column by column too."""

    def zeros(self, p):
        return torch.zeros_like(p.t().contiguous().t() if p.shape == (48, 48) else p)

    def update(self, p, average, lr):
        update = p.grad * 0.9
        update.chunk(2)[0].add_(0.9)
        p.add_(update.tanh(), alpha=-lr)
        update = update.square()
        average.add_(0.5)
        average.copy_(update)
        update[0] = 3.0
        p.add_(average.tanh() + update, alpha=-lr)


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def muon(params):
    params = list(params)
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02, ns_steps=2), torch.optim.AdamW(rest, lr=0.01)]


KINDS = {
    "muon": muon,
    "lion": lambda params: [Lion(params)],
    "parts": lambda params: [Parts(params)],
    "tangled": lambda params: [Tangled(params)],
    "adamw": lambda params: [torch.optim.AdamW(params, lr=0.01, foreach=False)],
    "nadam": lambda params: [torch.optim.NAdam(params, lr=0.01, foreach=False)],
}


def captured(kind, passes, steps=3):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 40))
    model = copy.deepcopy(eager)
    own, theirs = KINDS[kind](model.parameters()), KINDS[kind](eager.parameters())
    batch = {name: torch.randn(64, 40) for name in "xy"}
    step = stepgraph.capture(model, mse, batch, own, max_grad_norm=1.0, passes=passes)
    for _ in range(steps):
        step(batch)
        mse(eager, batch).backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        for one in theirs:
            one.step()
            one.zero_grad()
    tolerance = {"rtol": 1e-2, "atol": 2e-3} if kind == "muon" else {"rtol": 1e-5, "atol": 1e-6}
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    for one, other in zip(own, theirs, strict=True):
        for a, b in zip(one.state.values(), other.state.values(), strict=True):
            for name in b:
                torch.testing.assert_close(a[name], b[name], **tolerance)
    return step


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_updates(kind):
    step = captured(kind, PASSES)
    nodes = [n for n in step.graph.nodes("optimizer") if n.meta.get(COMPILE)]
    assert step.report[-1].changed == len(nodes) > 10
    written = [n for n in nodes if is_mutating(n)]
    assert all(n.target is aten.copy_.default for n in written)
    if kind not in ("tangled", "parts"):  # each parameter and each state of the three matrices is written once
        names = [n.args[0].name for n in written]
        assert len(names) == len(set(names)) == {"muon": 6, "lion": 6, "adamw": 9, "nadam": 9}[kind]


@pytest.mark.parametrize("kind", ["muon", "lion"])
def test_gradients_that_a_gpu_clips_together(kind, monkeypatch):
    """Those of matrices are clipped where they are read; small ones stay together."""
    apart = gradients.clip

    def together(grads, *given):
        _, norm = apart(grads, *given)
        clipped = aten._foreach_mul.Tensor(list(grads.values()), torch.clamp((norm + 1e-6).reciprocal(), max=1.0))
        return dict(zip(grads, clipped, strict=True)), norm

    monkeypatch.setattr(gradients, "clip", together)
    step = captured(kind, PASSES)
    (clip,) = [n for n in step.graph.nodes("optimizer") if n.target is aten._foreach_mul_.Tensor]
    assert len(clip.args[0]) == 3 and all(grad.meta["val"].numel() < 100 for grad in clip.args[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind):
    step = captured(kind, [*PASSES, "inductor"])
    assert step.report[-1].changed > sum(1 for _ in step.graph.nodes("forward", "backward"))


@pytest.mark.parametrize("kind", ["muon", "lion", "adamw"])
def test_an_update_left_out_changes_nothing(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 40))
    own, batch = KINDS[kind](model.parameters()), {name: torch.randn(64, 40) for name in "xy"}
    step = stepgraph.capture(model, mse, batch, own, max_grad_norm=1.0, on_nonfinite="skip", passes=PASSES)
    assert step.report[-1].changed
    step(batch)
    tensors = [*model.parameters(), *(t for one in own for held in one.state.values() for t in held.values())]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in tensors]
    step(batch | {"y": batch["y"] * float("nan")})
    assert all(map(torch.equal, before, tensors))
    step(batch)
    assert not any(torch.equal(a, b) for a, b in zip(before, tensors, strict=True) if a.ndim == 2)


class Keeping(torch.optim.Optimizer):
    """Keeps the average of the step before, copied in both ways."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p].update({name: torch.full_like(p, 0.1) for name in ("a", "average", "b")})
            state = self.state[p]
            state["a"].copy_(state["average"])
            before = state["average"].clone()
            state["average"].lerp_(p.grad, 0.5)
            state["b"].copy_(before)
            p.sub_(state["average"], alpha=0.01)


def test_what_is_copied_before_it_is_changed():
    model = nn.Linear(64, 64, bias=False)
    optimizer = Keeping(model.parameters(), {"lr": 0.01})
    step = stepgraph.capture(
        model, lambda m, x: m(x).square().mean(), torch.randn(8, 64), optimizer, passes=[*PASSES, get("inductor")]
    )
    step(torch.randn(8, 64))
    (state,) = optimizer.state.values()
    assert next(report for report in step.report if report.name == "fuse_updates").changed
    assert all((state[name] == 0.1).all() for name in "ab") and not (state["average"] == 0.1).all()

"""Muon's products over several matrices at once, and symmetric ones by half."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.passes import get

aten, ours = torch.ops.aten, torch.ops.stepgraph
#: On a GPU it pays; its arithmetic is the same here.
PASS = replace(get("orthogonalize"), needs_cuda=False)
EVERYWHERE = PASS.with_options(reached=1e3)  # symmetric products halved whatever that saves


class Written(torch.optim.Optimizer):
    """Muon as Keller Jordan wrote it."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.95).add_(p.grad)
                x = p.grad.add(state["momentum"], alpha=0.95).bfloat16()
                tall = x.size(-2) > x.size(-1)
                x = x.mT if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.mT
                    b = -4.775 * a + 2.0315 * a @ a
                    x = 3.4445 * x + b @ x
                p.add_((x.mT if tall else x).to(p.dtype), alpha=-group["lr"])


class Stacked(torch.optim.Optimizer):
    """Muon over stacks of matrices of one shape, tall ones from the right, as nanochat has it."""

    def __init__(self, params, lr=0.02):
        shapes = {}
        for p in params:
            shapes.setdefault(p.shape, []).append(p)
        super().__init__([{"params": group} for group in shapes.values()], {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                self.state[p]["momentum"].lerp_(p.grad, 0.05)
            x = torch.stack([p.grad.lerp(self.state[p]["momentum"], 0.95) for p in params]).bfloat16()
            x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
            for a, b, c in ((8.156, -22.483, 15.879), (4.043, -2.809, 0.5), (3.892, -2.772, 0.506)):
                if x.size(-2) > x.size(-1):
                    gram = x.mT @ x
                    x = a * x + x @ (b * gram + c * (gram @ gram))
                else:
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * (gram @ gram)) @ x
            for p, one in zip(params, x.unbind(), strict=True):
                p.sub_(one.to(p.dtype) * group["lr"])


class Layers(nn.Module):
    def __init__(self, layers=3, wide=24, hidden=56):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(wide, wide), nn.Linear(wide, hidden), nn.Linear(hidden, wide)])
            for _ in range(layers)
        )

    def forward(self, x):
        for mix, up, down in self.layers:
            x = x + down(up(mix(x)).tanh())
        return x


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def optimizers(model, kind):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [kind(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def batch():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(64, 24, generator=generator) for name in "xy"}


def check(passes, kind, make=Layers, steps=3):
    """The captured step, after ``steps`` from where eager began: updates to what bf16 products round, 3% of eager's."""
    torch.manual_seed(0)
    eager = make()
    model, start = copy.deepcopy(eager), copy.deepcopy(eager)
    own, theirs = optimizers(model, kind), optimizers(eager, kind)
    step = stepgraph.capture(model, mse, batch(), own, max_grad_norm=1.0, passes=passes)
    for _ in range(steps):
        step(batch())
        mse(eager, batch()).backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        for one in theirs:
            one.step()
            one.zero_grad()
    for a, b, old in zip(eager.parameters(), model.parameters(), start.parameters(), strict=True):
        assert (a - b).norm() < 0.05 * (a - old).norm()
    return step


def count(step, *targets):
    return sum(node.target in targets for node in step.graph.nodes("optimizer"))


@pytest.mark.parametrize("kind", [torch.optim.Muon, Written])
def test_matrices_of_one_form_together(kind):
    step = check([PASS, "inplace_update"], kind)
    report = step.report[0]
    assert report.matched == 9 and "9 of them in 2 stacks; 0 symmetric" in report.summary  # up and down: one form
    iterations = 5 if kind is torch.optim.Muon else 3
    assert count(step, aten.bmm.default) == 2 * iterations == count(step, aten.baddbmm.default) / 2
    assert not count(step, aten.mm.default, aten.addmm.default)


@pytest.mark.parametrize("kind", [torch.optim.Muon, Written])
def test_symmetric_products_by_half(kind):
    step = check([EVERYWHERE, "inplace_update"], kind)
    iterations = 5 if kind is torch.optim.Muon else 3
    assert f"{4 * iterations} symmetric" in step.report[0].summary
    assert count(step, ours.gram.default) == 4 * iterations and count(step, aten.baddbmm.default) == 2 * iterations
    alone = check([EVERYWHERE.with_options(most=0), "inplace_update"], kind)
    assert "0 of them in 0 stacks" in alone.report[0].summary
    assert count(alone, ours.gram.default) == 9 * 2 * iterations and not count(alone, aten.bmm.default)


def test_what_is_stacked_is_no_more_than_allowed():
    step = check([PASS.with_options(most=2 * 2 * 24 * 56), "inplace_update"], torch.optim.Muon)
    assert "9 of them in 4 stacks" in step.report[0].summary  # three mixes, and three pairs of the others


def test_stacks_that_the_optimizer_made():
    cleanup = ["remove_noop_views", "dedupe_casts", "dead_code"]
    step = check([*cleanup, EVERYWHERE, "inplace_update"], Stacked)
    report = step.report[3]
    assert report.matched == 3 and "0 of them in 0 stacks; 18 symmetric" in report.summary
    assert count(step, ours.gram.default) == 18 and count(step, aten.baddbmm.default) == 9
    assert not count(step, aten.bmm.default)


class Coupled(torch.optim.Optimizer):
    """Every second matrix's update follows the matrix before it, as already updated; ``reads``: for its direction, or
    from memory that the update before writes, ahead of its products."""

    def __init__(self, params, lr, reads):
        super().__init__(params, {"lr": lr})
        self.reads = reads

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            last = None
            for p in group["params"]:
                x = p.grad.bfloat16()
                if self.reads == "direction" and last is not None:
                    x = (p.grad + 0.01 * last).bfloat16()
                elif last is not None:
                    p.add_(last, alpha=1e-3)
                x = x / (x.norm() + 1e-7)
                for _ in range(2):
                    a = x @ x.mT
                    x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.775, alpha=2.0315), x, beta=3.4445)
                p.add_(x.to(p.dtype), alpha=-group["lr"])
                last = p if last is None else None


class Equal(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("reads", ["direction", "memory"])
def test_what_follows_an_update_is_not_stacked_with_it(reads):
    def coupled(params, lr):
        return Coupled(list(params), lr, reads)

    torch.manual_seed(0)
    model = Equal()
    eager = copy.deepcopy(model)
    own, theirs = coupled(model.parameters(), 0.02), coupled(eager.parameters(), 0.02)
    passes = ["inplace_update", PASS]  # then the graph says what depends on what by memory alone
    step = stepgraph.capture(model, mse, batch(), own, passes=passes[::-1] if reads == "direction" else passes)
    (report,) = (r for r in step.report if r.name == "orthogonalize")
    assert report.matched == 4 and "2 of them in 1 stacks" in report.summary  # the second and the third
    for _ in range(2):
        step(batch())
        mse(eager, batch()).backward()
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


class Reused(torch.optim.Optimizer):
    """Writes what the products read, or draws noise, where ``when`` says: the iteration, or the square of a product, is
    none of the pattern, or updates do not wait."""

    def __init__(self, params, when):
        super().__init__(params, {"lr": 0.02})
        self.when = when

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                x = first = p.grad.bfloat16() / (p.grad.norm() + 1e-7)
                if self.when == "noise":
                    x = x + 0.01 * torch.randn_like(x)
                a = x @ x.mT
                if self.when == "square":
                    a[0, 1:] = 1
                b = -1.5 * a + 0.5 * (a @ a)
                if self.when == "inside":
                    x[0].mul_(0.25)
                x = 2.0 * x + b @ x
                first.zero_()
                p.add_((x + torch.rand_like(x) if self.when == "noise" else x).to(p.dtype), alpha=-group["lr"])


@pytest.mark.parametrize("when", ["after", "inside", "square", "noise"])
def test_what_is_written_or_drawn_between(when):
    torch.manual_seed(0)
    model = Equal()
    eager = copy.deepcopy(model)
    own, theirs = (Reused(m.parameters(), when) for m in (model, eager))
    step = stepgraph.capture(model, mse, batch(), own, passes=[EVERYWHERE, "inplace_update"])
    assert " 0 of them in" in step.report[0].summary
    for run in (lambda: step(batch()), lambda: (mse(eager, batch()).backward(), theirs.step())):
        torch.manual_seed(1)
        run()
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)

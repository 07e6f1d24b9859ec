"""Large products by an operator that chooses its algorithm: which are replaced, and the bits of a step."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph
from stepgraph.kernels import cublas_lt
from stepgraph.kernels.cublas_lt import Problem
from stepgraph.kernels.products import product
from stepgraph.passes import Target, configured, exact, get
from stepgraph.passes.matmul import tune
from stepgraph.passes.runner import unusable

aten, ours = torch.ops.aten, torch.ops.stepgraph
BF16 = torch.bfloat16


class Mlp(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.odd = nn.Linear(width, 3, bias=False)

    def forward(self, x):
        return self.odd(self.down(F.gelu(self.up(x)))).float().square().mean()


def losses(passes, dtype=BF16):
    torch.manual_seed(0)
    model = Mlp().to(dtype)
    batch = torch.randn(48, 64, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = stepgraph.capture(model, lambda m, x: m(x), batch, optimizer, passes=passes)
    return torch.stack([step(batch) for _ in range(3)]), step


def tuned(**options):
    before = [p for p in exact() if not p.terminal]
    return [*before, replace(get("tune_products", **options), needs_cuda=False)]


def called(step, target):
    return [n for n in step.graph.graph.nodes if n.target is target]


def report_of(step):
    return next(report for report in step.report if report.name == "tune_products")


def test_products_are_replaced_and_every_bit_stays():
    expected, _ = losses("exact")
    found, step = losses(tuned(least=1))
    assert torch.equal(found, expected)
    report = report_of(step)
    left = called(step, aten.mm.default) + called(step, aten.addmm.default)
    assert (
        report.changed == len(called(step, ours.product.default)) == 5
    )  # both of the first two layers, and three gradients
    assert report.matched == report.changed + len(left)
    assert all(3 in (*n.args[-2].meta["val"].shape, *n.args[-1].meta["val"].shape) for n in left)


def test_what_is_left():
    assert report_of(losses(tuned(least=1), torch.float32)[1]).changed == 0
    assert report_of(losses(tuned())[1]).changed == 0  # too small
    assert report_of(losses(tuned(least=1, most=2))[1]).changed == 0
    assert "tune_products" in [p.name for p in configured()]
    assert "tune_products" not in [p.name for p in configured(any_length=True)]
    assert unusable(get("tune_products"), Target("cpu"))


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_problem_is_how_operands_lie(turned, biased):
    a, b = torch.randn(24, 40, dtype=BF16), torch.randn(40, 16, dtype=BF16)
    a, b = (x.t().contiguous().t() if turn else x for x, turn in zip((a, b), turned, strict=True))
    bias = torch.randn(16, dtype=BF16) if biased else None
    strides = (24 if turned[0] else 40, 40 if turned[1] else 16)
    assert Problem.of(a, b, bias) == Problem(24, 16, 40, BF16, turned, strides, biased, 0)
    assert torch.equal(product(a, b, bias), torch.mm(a, b) if bias is None else torch.addmm(bias, a, b))


def test_problems_that_are_not_tried():
    a, b = torch.randn(24, 40, dtype=BF16), torch.randn(40, 16, dtype=BF16)
    assert Problem.of(a, b, None)
    assert Problem.of(torch.randn(24, 80, dtype=BF16)[:, :40], b, None)  # rows lie apart
    assert not Problem.of(torch.randn(24, 80, dtype=BF16)[:, ::2], b, None)  # neither rows nor columns are dense
    assert not Problem.of(a[:, :1].expand(24, 40), b, None)
    assert not Problem.of(torch.randn(24, 44, dtype=BF16)[:, :40], b, None)  # not apart by a multiple of 16 bytes
    assert not Problem.of(a, b[:, :12], None)
    assert not Problem.of(a.float(), b.float(), None)
    assert not Problem.of(a, b, torch.randn(24, 16, dtype=BF16))
    assert not Problem.of(a, b, torch.randn(16))


def test_a_choice_belongs_to_torchs_settings():
    before, own = cublas_lt._settings(), torch.backends.cuda.matmul
    own.allow_fp16_accumulation = not own.allow_fp16_accumulation
    try:
        assert len({before, cublas_lt._settings()}) == 2
    finally:
        own.allow_fp16_accumulation = not own.allow_fp16_accumulation
    assert cublas_lt._settings() == before


def test_the_report_says_what_was_found(monkeypatch):
    found = {64: cublas_lt.Choice(30.0, 20.0, print), 256: cublas_lt.Choice(0.0, 0.0, None, timed=False)}
    monkeypatch.setattr(tune, "choose", lambda problem: found[problem.n])
    monkeypatch.setattr(tune, "unavailable", lambda: None)
    given = replace(get("tune_products", least=1, timed=True), needs_cuda=False, for_target=lambda own, target: own)
    report = report_of(losses([*(p for p in exact() if not p.terminal), given])[1])
    assert "ms per step faster" in report.summary and any("20 us, 30 by torch" in note for note in report.notes)
    assert any("too little memory" in note for note in report.notes)
    monkeypatch.setattr(tune, "unavailable", lambda: "no library")
    report = report_of(losses([*(p for p in exact() if not p.terminal), given])[1])
    assert report.changed == 0 and report.notes == ["torch's algorithms are kept: no library"]


def test_torch_does_not_warn_of_waits_while_a_product_is_timed(monkeypatch):
    """Else a piece with a product that is first timed in a step's first call is left out of the step's CUDA graph."""
    modes = [1]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cublas_lt, "unavailable", lambda: None)
    monkeypatch.setattr(cublas_lt, "_settings", lambda: ("test",))
    monkeypatch.setattr(cublas_lt, "_timed", lambda problem: [*modes])
    monkeypatch.setattr(cublas_lt, "_CHOICES", {})
    assert cublas_lt.choose(Problem(8, 8, 8, BF16, (False, False), (8, 8), False, 0)) == [1, 0] and modes == [1, 0, 1]

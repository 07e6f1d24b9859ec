"""Runs one step of a model with and without the norm pass and compares."""

import contextlib
import copy

import torch

import stepgraph
from stepgraph.models import GolfConfig
from stepgraph.passes import get
from tests.passes.norm.norm_models import WIDTH

CLEAN = ["fold_constants", "remove_noop_views", "dedupe_casts", "dead_code"]
KERNEL = [*CLEAN, get("fuse_norm", choice="kernel")]
BF16 = torch.bfloat16
GOLF = GolfConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=37)


def square(model, batch, dtype=None, autocast=False):
    with torch.autocast("cpu", BF16) if autocast else contextlib.nullcontext():
        return model(batch["x"] if dtype is None else batch["x"].to(dtype)).float().square().mean()


def rows(*shape):
    return {"x": torch.randn(*(shape or (2, 5, WIDTH)))}


def run(model, loss_fn, batch, passes, **options):
    """(loss, gradients by name, step) of one step of a copy of ``model``."""
    model = copy.deepcopy(model)
    step = stepgraph.capture(model, loss_fn, batch, passes=passes, **options)
    loss = step(batch)
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, step


def report_of(step):
    return next(r for r in step.report if r.name == "fuse_norm")


def found(step):
    """{form: (forward, backward)} of the report."""
    forms = {}
    for note in report_of(step).notes:
        form, _, counts = note.rpartition(": ")
        if counts.endswith("backward"):
            forward, backward = (int(part.split()[0]) for part in counts.split(", "))
            forms[form] = forward, backward
    return forms


def count(step, target):
    return len(step.graph.graph.find_nodes(op="call_function", target=target.default))


def check(model, loss_fn, batch, passes=KERNEL, **options):
    """Loss and gradients as without the pass. fp32, rows of some ten numbers, few layers: both sides round some ten
    times by up to 2^-24, relative to the largest of the terms added."""
    expected = run(model, loss_fn, batch, CLEAN, **options)
    actual = run(model, loss_fn, batch, passes, **options)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    assert actual[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert actual[1][name].dtype == grad.dtype
        torch.testing.assert_close(actual[1][name], grad, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    return actual[2]


def check_rounded(model, loss_fn, wide_loss_fn, batch, passes=KERNEL):
    """In bf16 both the graph and the rewritten graph are off from float64 by roundings of 2^-9 in every operator; the
    operators round less often, so they may not be further off than the graph was, but for chance: a third more."""
    wide = copy.deepcopy(model).double()
    wide_loss_fn(wide, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}).backward()
    truth = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}

    def error(grads):
        squares = sum((grads[n].double() - g).square().sum() for n, g in truth.items())
        return (squares / sum(g.square().sum() for g in truth.values())).sqrt().item()

    _, before, _ = run(model, loss_fn, batch, CLEAN)
    _, after, step = run(model, loss_fn, batch, passes)
    assert all(after[n].dtype == grad.dtype for n, grad in before.items())
    assert error(after) < 1.33 * error(before) + 1e-6
    return step

"""fp8 products on gloo ranks against the same products on one rank."""

import dataclasses
import itertools

import pytest
import torch

import stepgraph
from stepgraph.models import next_token_loss as plain_loss
from stepgraph.models.llama3 import TP_PLAN
from stepgraph.parallel import next_token_loss, parallelize
from stepgraph.passes import configured
from tests.distributed.ranks import (
    TINY,
    full,
    global_batch,
    make_mesh,
    on_ranks,
    own_batch,
    parallel_model,
    whole_model,
)

CONFIG = dataclasses.replace(TINY, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=96)
BF16 = torch.bfloat16


def passes(recipe, **options):
    found = configured(fp8=recipe, inductor="off", **options)
    dear = "fp8_matmul"  # for so small a model
    return [p.with_options(unprofitable=True) if p.name == dear else p for p in found]


def captured(model, loss_fn, batch, recipe, **options):
    """(step, the loss of one step), whose gradients land in ``model``."""
    step = stepgraph.capture(model, loss_fn, batch, passes=passes(recipe, **options))
    report = next(r for r in step.report if r.name == "fp8_matmul")
    assert (report.matched, report.changed) == (8, 7) and report.notes[-1].endswith("the loss reads it: head")
    return step, step(batch)


def _check(text, recipe, tolerance, reshards):
    """One rank has the whole batch in one product: its loss and gradients are those of all ranks but for rounding."""
    mesh = make_mesh(text)
    model = whole_model(CONFIG).to(BF16)
    _, loss = captured(model, plain_loss, global_batch(0, mesh.spec.dp), recipe)
    found = []
    counts = {"gather_fp8": 7 * (mesh.spec.dp_shard > 1)}  # weights that are gathered in fp8
    fewer = ((), tuple(counts)) if recipe == "tensorwise" else ((),)
    for reshard, disable in itertools.product(reshards, fewer):
        sharded = parallel_model(mesh, CONFIG, param_dtype=BF16)
        options = {"reshard": reshard, "disable_pass": disable}
        step, own = captured(sharded, next_token_loss(mesh), own_batch(mesh, 0), recipe, **options)
        gathered = {r.name: r.changed for r in step.report if r.name in counts}
        assert gathered == (counts if recipe == "tensorwise" and not disable else {})
        found.append([own, *(p.grad.to_local() for p in sharded.parameters())])
    # What is gathered in fp8, or gathered and cast again, has the same bits.
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))
    torch.testing.assert_close(own, loss, rtol=tolerance / 100, atol=0)
    for (name, p), right in zip(sharded.named_parameters(), model.parameters(), strict=True):
        mine, right = full(sharded, name, p.grad).float(), right.grad.float()
        assert (mine - right).norm() < tolerance * right.norm(), name


def _check_nan():
    """One token that another rank has, that the loss does not count and no other token sees, makes the loss NaN: it is
    covered by the scale of all tokens."""
    mesh, model = make_mesh("tp=2"), whole_model(CONFIG)
    model.embed.weight.data[-1] = float("nan")
    sharded = parallelize(model, mesh, TP_PLAN, param_dtype=BF16)
    batch = own_batch(mesh, 0)
    batch["tokens"].clamp_(max=CONFIG.vocab_size - 2)
    step, loss = captured(sharded, next_token_loss(mesh), batch, "tensorwise")
    assert loss.isfinite()
    batch["tokens"][:, -1], batch["targets"][:, -1] = CONFIG.vocab_size - 1, -100
    assert step(batch).isnan()


def _check_all(reshards, *cases):
    for case in cases:
        _check(*case, reshards)


#: Under FSDP a row has the same scale on any rank, so with bf16 weight gradients only bf16 rounds (0.003 measured).
#: Each rank's part of a weight gradient is rounded to 3 bits by scales of its own (0.03), and one scale for all tokens
#: is another one for half of them, with output gradients of 2 bits (0.11). Tensor parallelism: the same of half rows.
SHORT = (("fsdp=2", "tensorwise", 0.2), ("tp=2", "tensorwise", 0.2))
LONG = (
    ("fsdp=2", "rowwise-bf16-weight-gradients", 0.006),
    ("fsdp=2", "rowwise", 0.06),
    ("tp=2", "rowwise", 0.1),
)


def _check_short(reshards, *cases):
    _check_all(reshards, *cases)
    _check_nan()


@pytest.mark.slow
def test_two_ranks_train_as_one():
    on_ranks(2, _check_short, ["always"], *SHORT)


@pytest.mark.long
def test_two_ranks_train_as_one_by_any_recipe():
    on_ranks(2, _check_all, ["never", "always"], *SHORT, *LONG)


@pytest.mark.long
def test_four_ranks_train_as_one():
    on_ranks(4, _check_all, ["always"], ("fsdp=2,tp=2", "tensorwise", 0.2))

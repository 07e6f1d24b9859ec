"""Ranks that differ: they are refused before the first step, in one line."""

import itertools
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepgraph
from stepgraph import compat
from stepgraph.parallel import next_token_loss, parallelize, plan_pipeline
from tests.distributed.ranks import TINY, make_mesh, on_ranks, own_batch, parallel_model, whole_model


def mean_square(model, x):
    return model(x).square().mean()


def linears(mesh, *sizes, seed=0):
    torch.manual_seed(seed)
    return parallelize(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))), mesh)


def refused(match, model, loss_fn=mean_square, batch=None, optimizer=True, **options):
    batch = torch.ones(2, 4) if batch is None else batch
    optimizer = torch.optim.SGD(model.parameters()) if optimizer else None
    with pytest.raises(ValueError, match=match) as raised:
        stepgraph.capture(model, loss_fn, batch, optimizer, **{"passes": "exact"} | options)
    assert "\n" not in str(raised.value)


def _models() -> None:
    mesh, other = make_mesh("ddp=2"), dist.get_rank() == 1
    alike = linears(mesh, 4, 4)
    stepgraph.capture(alike, mean_square, torch.ones(2, 4), passes="exact")
    seeded = linears(mesh, 4, 4, seed=other)
    for _ in range(2):  # refused again
        refused(r"ranks hold different values of 0\.weight, .*torch\.manual_seed", seeded)
    refused(
        r"number 3 of the model is none on rank 0, and 1\.weight float32\[4, 4\] on rank 1; build the same model",
        linears(mesh, *[4] * (3 if other else 2)),
    )
    frozen = linears(mesh, 4, 4)
    dict(frozen.named_parameters())["0.bias"].requires_grad_(not other)
    refused(r"0\.bias float32\[4\] on rank 0, and 0\.bias float32\[4\], frozen on rank 1", frozen)
    turned = nn.Sequential(nn.Linear(4, 4))
    if other:
        turned[0]._parameters = {name: turned[0]._parameters[name] for name in ("bias", "weight")}
    refused("number 1 of the model is 0.weight", parallelize(turned, mesh))


def _steps() -> None:
    mesh, other = make_mesh("fsdp=2"), dist.get_rank() == 1
    make = partial(linears, mesh, 4, 4, 4)

    def skips(model, x):
        return mean_square(model[0] if other else model, x)

    refused(
        r"number 1 of the collectives of dp_shard is all_gather .*1\.weight.* on rank 0, and .* on rank 1; build",
        make(),
        skips,
    )
    refused("number .* and none on rank 1; they differ in accumulate", make(), accumulate=1 if other else 2)
    refused("all_reduce sum float32", make(), max_grad_norm=1.0 if other else None)
    sizes = [2, 3 if other else 2]

    def exchanges(model, x):  # equal parts on one rank only
        c10d = torch.ops._c10d_functional
        x = c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, dist.group.WORLD.group_name))
        return mean_square(model, x)

    stepgraph.capture(make(), exchanges, torch.ones(sum(sizes), 4), passes="exact")
    passes = stepgraph.StepOptions(inductor="off", reshard="always" if other else "auto")
    refused("they differ in the pass ", parallel_model(mesh), next_token_loss(mesh), own_batch(mesh, 0), passes=passes)


def _lengths() -> None:
    other = dist.get_rank() == 1
    mesh = make_mesh("fsdp=2")
    model = linears(mesh, 4, 4)
    step = stepgraph.capture(model, mean_square, torch.ones(2, 4), torch.optim.SGD(model.parameters()), passes="exact")
    for rows in (2, 4 if other else 2, 2, 6):  # only parameters and gradients travel
        step(torch.ones(rows, 4))
    mesh = make_mesh("tp=2")
    spare = dist.new_group()
    if other:  # whose graphs then call their group tp.1
        assert compat.name_group(spare, "tp") == "tp"
    model, loss_fn = parallel_model(mesh), next_token_loss(mesh)
    batches = [own_batch(mesh, 0, rows) for rows in (1, 2, 3)]
    step = stepgraph.capture(model, loss_fn, batches[0], passes="exact")
    for batch in batches[:2]:  # both meet a new form
        step(batch)
    with pytest.raises(ValueError, match=r"number 1 of the collectives of tp is .* they differ in .*tokens"):
        step(own_batch(mesh, 0, 5 if other else 6))
    if other:
        compat.default_store().set_timeout(timedelta(seconds=0.1))
        with pytest.raises(
            ValueError, match=r"rank 1 has a form .*collectives of tp, and waits for rank 0, which runs"
        ):
            step(batches[2])
    step(batches[1])


def _stages() -> None:
    tp, other = make_mesh("tp=2"), dist.get_rank() == 1
    own = own_batch(tp, int(other))
    refused(
        r"ranks 0 and 1 share data, and .*tokens.* differ: .*dp_place",
        parallel_model(tp),
        next_token_loss(tp),
        own,
    )
    mesh = make_mesh("pp=2")
    model, loss_fn, batch = whole_model(replace(TINY, n_layers=2)), next_token_loss(mesh), own_batch(mesh, 0, 4)
    parallelize(model, mesh, pipeline=plan_pipeline(model, loss_fn, own_batch(mesh, 0, 1), mesh))
    held = torch.optim.SGD([param for param in model.parameters() if not param.is_meta])
    make = partial(stepgraph.capture, model, loss_fn, batch, held, passes="exact")
    with pytest.raises(ValueError, match=r"number 1 of the messages of pp is float.*; they differ in accumulate;"):
        make(accumulate=2 if other else 4)
    make(accumulate=2)(batch)


def _differ() -> None:
    _models()
    _steps()
    _stages()


def test_models_and_steps_that_differ_are_refused():
    on_ranks(2, _differ)


def test_a_rank_alone_may_meet_a_length_that_no_collective_depends_on():
    on_ranks(2, _lengths)

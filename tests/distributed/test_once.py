"""Inside a pipeline's stage with FSDP, parameters are gathered once a step, and gradients reduced once."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph import parallel
from stepgraph.graph import collectives
from stepgraph.graph.provenance import role_of
from stepgraph.models import next_token_loss as one_rank_loss
from stepgraph.parallel import next_token_loss
from stepgraph.passes import configured, get
from tests.distributed.ranks import TINY, make_mesh, on_ranks, own_batch, whole_model
from tests.distributed.test_pipeline import eager_gradients, pipelined

CONFIG = dataclasses.replace(TINY, n_layers=4)


def captured(mesh, schedule, n, passes, config=CONFIG):
    model, _ = pipelined(mesh, schedule, config)
    return model, stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0, n), accumulate=n, passes=passes)


def with_reductions_once():
    found = configured("exact")
    at = next(i for i, p in enumerate(found) if p.name == "reshard_after_forward")
    return [*found[:at], get("reduce_once"), *found[at:]]


def gradients(model, step, batch):
    loss = step(batch)
    held = parallel.held_parameters(model)
    return loss, {name: param.grad.to_local() for name, param in held.items()}


def collectives_a_step(step, kind):
    """How often a step begins a collective of ``kind``, a role, by the graph that does."""
    found = Counter()
    for call in step.program.schedule:
        for node in step.graphs[call.graph].graph.nodes:
            role = collectives.stage_of(node) == "begin" and role_of(node)
            found[call.graph] += bool(role) and role.kind == kind
    return +found


def check_against_each(schedule, n, config):
    """Gathered once or for each microbatch: the same bits, by a share of the collectives."""
    mesh = make_mesh("pp=2,fsdp=2")
    batch = own_batch(mesh, 0, n)
    each = [p for p in configured("exact") if p.name != "gather_once"]
    model, step = captured(mesh, schedule, n, each, config)
    begun = {kind: sum(collectives_a_step(step, kind).values()) for kind in ("gather", "reduce")}
    loss, expected = gradients(model, step, batch)
    model, step = captured(mesh, schedule, n, "exact", config)
    again, found = gradients(model, step, batch)
    assert torch.equal(again, loss) and found.keys() == expected.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert sum(collectives_a_step(step, "gather").values()) == begun["gather"] // n
    assert sum(collectives_a_step(step, "reduce").values()) == begun["reduce"]
    step = check(schedule, n, config, mesh)
    assert sum(collectives_a_step(step, "reduce").values()) == begun["reduce"] // n


def check(schedule, n, config, mesh=None):
    """Reduced once: as summed over microbatches by eager on each rank, and then over ranks."""
    mesh = mesh or make_mesh("pp=2,fsdp=2")
    batch = own_batch(mesh, 0, n)
    model, step = captured(mesh, schedule, n, with_reductions_once(), config)
    for kind in ("gather", "reduce"):
        assert collectives_a_step(step, kind).keys() == {f"{kind}.{i}" for i in step.pipeline.own}
        assert sum(call.kind == kind for call in step.program.schedule) == len(step.pipeline.own)
    alone = whole_model(config)
    loss = eager_gradients(alone, one_rank_loss, batch, n)
    dist.all_reduce(loss, group=mesh.stage_group)
    ours, found = gradients(model, step, batch)
    torch.testing.assert_close(ours, loss / 2)  # the captured step's mean over ranks comes microbatch by microbatch
    for name, param in alone.named_parameters():
        dist.all_reduce(param.grad, group=mesh.stage_group)
        if name in found:
            layout = parallel.layouts(model)[name]
            part = (param.grad / 2)[tuple(slice(*part) for part in layout.region)]
            assert torch.equal(layout.own(found[name]), part), name
    once = {name: grad.clone() for name, grad in found.items()}
    _, twice = gradients(model, step, batch)  # sums begin anew every step, and land in what the first one left
    assert all(torch.equal(grad, 2 * once[name]) for name, grad in twice.items())
    return step


def test_collectives_do_not_grow_with_the_microbatches():
    on_ranks(4, check, "1f1b", 3, dataclasses.replace(TINY, n_layers=2))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ("interleaved", "zero-bubble", "dualpipev"))
def test_every_kind_of_schedule(schedule):
    on_ranks(4, check_against_each, schedule, 4, CONFIG)

"""`step.verify` on ranks: each compares its own shards, all run together, and everything is put back."""

import dataclasses

import pytest
import torch

import stepgraph
from stepgraph.parallel import next_token_loss
from stepgraph.passes.contract import NoOptions, Pass
from tests.distributed.ranks import TINY, make_mesh, on_ranks, own_batch, parallel_model

LAYERS = dataclasses.replace(TINY, n_layers=2)


def local_state(model, optimizer):
    """The shards of this rank: parameters, gradients and optimizer state, by object and value."""
    tensors = [(p, p.to_local()) for p in model.parameters()]
    for param in model.parameters():
        tensors += [
            (value, getattr(value, "to_local", lambda v=value: v)()) for value in optimizer.state[param].values()
        ]
    return [(id(tensor), local.data_ptr(), local.detach().clone()) for tensor, local in tensors]


def check_same(before, after):
    for (owner, place, value), (owner_now, place_now, value_now) in zip(before, after, strict=True):
        assert owner == owner_now and place == place_now and torch.equal(value, value_now)


def check(text):
    mesh = make_mesh(text)
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    model = parallel_model(mesh, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=0.5, accumulate=2, passes="exact")
    for _ in range(2):
        before = local_state(model, optimizer)
        report = step.verify(batch)
        assert report.bitwise, str(report)
        assert report.compared["parameter"] == len(before) // 4
        check_same(before, local_state(model, optimizer))
        step(batch)


def scale_on_rank_1(step, options, report):
    """Multiplies the loss's gradient on one rank alone: the others must go on with it."""
    if torch.distributed.get_rank() == 1:
        node = next(n for n in step.graph.nodes if n.target is torch.ops.aten.rsqrt.default)
        with step.graph.inserting_after(node):
            new = step.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def check_found():
    mesh = make_mesh("fsdp=2")
    loss_fn, batch = next_token_loss(mesh), own_batch(mesh, 0)
    model = parallel_model(mesh, LAYERS)
    passes = [Pass("scaled", "numerics", scale_on_rank_1, "scales", NoOptions())]
    report = stepgraph.capture(model, loss_fn, batch, passes=passes).verify(batch, locate=True)
    assert not report.bitwise  # gradients are summed over the ranks
    assert "they differ with the pass scaled" in report.parted
    if torch.distributed.get_rank() == 1:
        assert "aten.mul.Tensor, forward of " in report.parted, report.parted


@pytest.mark.parametrize(("mesh", "world"), [("fsdp=2", 2), pytest.param("fsdp=2,tp=2", 4, marks=pytest.mark.long)])
def test_exact_on_ranks_is_bitwise_and_put_back(mesh, world):
    on_ranks(world, check, mesh)


def test_a_difference_of_one_rank_is_found_together():
    on_ranks(2, check_found)

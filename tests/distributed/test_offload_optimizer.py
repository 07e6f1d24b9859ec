"""Shards of the optimizer's state stay on the host, with the same bits, and are saved and loaded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stepgraph
from stepgraph import parallel
from stepgraph.graph.host_copies import STORE_BEGIN
from stepgraph.parallel import next_token_loss
from stepgraph.passes import StepOptions
from tests.distributed.ranks import global_batch, in_fake_world, make_mesh, on_ranks, own_batch, parallel_model
from tests.distributed.test_pipeline import SHORT, pipelined

PEAK = "peak=0.00033GiB"


def _check(folder):
    mesh = make_mesh("fsdp=2")
    found = []
    for offload in (False, True, True):  # the third is loaded
        model = parallel_model(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        options = {"passes": StepOptions("exact", offload_optimizer=offload), "max_grad_norm": 1.0, "saved": folder}
        step = stepgraph.capture(model, next_token_loss(mesh), own_batch(mesh, 0), optimizer, **options)
        losses = [step(own_batch(mesh, i)) for i in range(2)]
        state = [v for slots in optimizer.state.values() for v in slots.values()]
        found.append([t.to_local() if hasattr(t, "to_local") else t for t in (*losses, *model.parameters(), *state)])
    assert step.saved.loaded
    assert sum(node.target is STORE_BEGIN for node in step.graph.graph.nodes) == 2 * len(list(model.parameters()))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.long
def test_shards_of_state(tmp_path):
    on_ranks(2, _check, tmp_path)


def _check_pipeline(folder):
    """Each rank's stage, and as much of its state as a peak needs; saved and loaded."""
    mesh, found = make_mesh("pp=2"), []
    first, _ = pipelined(mesh, "1f1b", SHORT)
    for options in ({}, {"offload_optimizer": True}, {"offload_optimizer": True}, {"memory": PEAK}):
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = stepgraph.capture(
            model, next_token_loss(mesh), global_batch(0, 1, 2), optimizer, max_grad_norm=0.1, accumulate=2,
            passes=StepOptions("exact", **options), saved=folder,
        )  # fmt: skip
        losses = [step(global_batch(i, 1, 2)) for i in range(2)]
        held = parallel.held_parameters(model)
        state = [v for p in held.values() for v in optimizer.state[p].values()]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (*losses, *held.values(), *state)]
        moved = [node for node in step.graphs["update"].graph.nodes if node.target is STORE_BEGIN]
        found.append((local, len(moved), len(held), step.saved.loaded))
    for local, *_ in found[1:]:
        assert all(map(torch.equal, found[0][0], local))
    assert [moved / count for _, moved, count, _ in found[:3]] == [0, 2, 2]
    everywhere = [None, None]  # stages need unequal shares
    dist.all_gather_object(everywhere, found[3][1:3])
    assert 0 < sum(moved for moved, _ in everywhere) < 2 * sum(count for _, count in everywhere)
    assert [loaded for *_, loaded in found] == [False, False, True, False]


@pytest.mark.long
def test_stages_of_a_pipeline(tmp_path):
    on_ranks(2, _check_pipeline, tmp_path)


def _check_graph():
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = stepgraph.capture(
        model, lambda model, x: (x @ model.weight.full_tensor()).square().mean(), torch.randn(3, 4), optimizer,
        passes=StepOptions("exact", offload_optimizer=True),
    )  # fmt: skip
    stored = [node for node in step.graph.graph.nodes if node.target is STORE_BEGIN]
    assert [node.args[0].meta["val"].shape for node in stored] == [(2, 4)] * 2


def test_a_shard_of_state():
    in_fake_world(0, 2, _check_graph)

"""Shards of the optimizer's state stay on the host, with the same bits, and are saved and loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stepgraph
from stepgraph.graph.host_copies import STORE_BEGIN
from stepgraph.parallel import next_token_loss
from stepgraph.passes import StepOptions
from tests.distributed.ranks import in_fake_world, make_mesh, on_ranks, own_batch, parallel_model


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

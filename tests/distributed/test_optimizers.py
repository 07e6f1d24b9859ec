"""On sharded parameters: optimizers that need whole matrices are refused, those that work by elements run."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stepgraph
from tests.capture import own_optimizers
from tests.distributed.ranks import in_fake_world


def _check():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))

    def loss_fn(model, x):
        return (x @ model.weight.full_tensor()).square().mean()

    refused = {
        torch.optim.Adafactor: "Adafactor needs whole matrices",
        own_optimizers.Lamb: r"Lamb.step \(.*own_optimizers.py:\d+\) computes by aten.*norm.*needs whole",
        own_optimizers.Soap: "Soap.step reads shape of tensors",
        own_optimizers.BySize: "BySize.step reads shape of tensors",
    }
    for kind, message in refused.items():
        with pytest.raises(ValueError, match=message + ".*is sharded; use"):
            stepgraph.capture(model, loss_fn, torch.randn(3, 4), kind(model.parameters()), passes="exact")
    halves = model.weight.data.bfloat16()
    model.weight = nn.Parameter(halves)
    with pytest.raises(ValueError, match="nesterov=False writes what it orthogonalizes into a bf16 momentum"):
        stepgraph.capture(model, lambda *given: loss_fn(*given).float(), torch.randn(3, 4).bfloat16(),
                          torch.optim.Muon(model.parameters(), nesterov=False), passes="exact")  # fmt: skip
    model.weight = nn.Parameter(distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match=r"equal shards.*shape \[5, 4\] is placed as S\(0\) over 2 ranks; use stepgraph"
    ):
        stepgraph.capture(model, loss_fn, torch.randn(3, 5), torch.optim.Muon(model.parameters()), passes="exact")
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    for kind in (torch.optim.RMSprop, torch.optim.NAdam, own_optimizers.Lion, own_optimizers.Momentum):
        optimizer = kind(model.parameters(), lr=0.1)
        step = stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes="exact")
        for _ in range(2):
            step(torch.randn(3, 4))
        large = [v for v in optimizer.state[model.weight].values() if isinstance(v, torch.Tensor) and v.ndim]
        assert {(value.shape, value.to_local().shape) for value in large} == {((4, 4), (2, 4))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes="exact")
    assert [s.tensor.shape for s in step.graph.inputs if s.what.kind == "optimizer"] == [(2, 4)]


def test_sharded_parameters():
    in_fake_world(0, 2, _check)


def _check_reads():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)

    def loss_fn(model, batch):
        weight = getattr(model.weight, "full_tensor", lambda: model.weight)()
        return (batch["x"] @ weight)[: batch["n"].max().item()].square().mean()

    batch = {"x": torch.randn(3, 4), "n": torch.tensor([1, 2])}
    stepgraph.capture(model, loss_fn, batch, passes="exact")
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"item.*over a mesh Python may read no value of a batch.*train on one GPU"):
        stepgraph.capture(model, loss_fn, batch, passes="exact")


def test_over_a_mesh_python_reads_no_value_of_the_batch():
    """One rank's batch may ask for another graph than the others run."""
    in_fake_world(0, 2, _check_reads)

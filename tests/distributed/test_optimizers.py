"""On sharded parameters: optimizers that need whole matrices are refused, those that work by elements run."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stepgraph
from tests.distributed.ranks import in_fake_world


def _check():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))

    def loss_fn(model, x):
        return (x @ model.weight.full_tensor()).square().mean()

    for kind in (torch.optim.Muon, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs whole matrices.*is sharded; use AdamW, Adam"):
            stepgraph.capture(model, loss_fn, torch.randn(3, 4), kind(model.parameters()), passes="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes="exact")
    assert [s.tensor.shape for s in step.graph.inputs if s.what.kind == "optimizer"] == [(2, 4)]


def test_sharded_parameters():
    in_fake_world(0, 2, _check)

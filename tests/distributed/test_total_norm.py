"""The norm that clips, of parameters on different meshes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import stepgraph
from stepgraph.capture import gradients
from tests.distributed.ranks import on_ranks


def _layouts():
    """(mesh, placements) of four parameters: over all ranks, over rows and over columns of ranks, and a plain one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(1), Shard(0)]),
        (mesh["tp"], [Shard(1)]),
        (mesh["dp"], [Replicate()]),
        (None, None),
    ]


def _norm(which):
    torch.manual_seed(0)
    whole = [torch.randn(8, 4) for _ in range(5)]
    params, local = [], {}
    for i, (mesh, placements) in enumerate(_layouts()):
        grad = whole[i] if mesh is None else distribute_tensor(whole[i], mesh, placements)
        params.append(nn.Parameter(grad.clone()))
        local[i] = whole[i] if mesh is None else grad.to_local()
    chosen = {i: local[i] for i in which}
    clipped, norm = gradients.clip(chosen, params, 0.5)
    expected = torch.linalg.vector_norm(torch.cat([whole[i].flatten() for i in which]))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for i, grad in clipped.items():
        torch.testing.assert_close(grad, local[i] * (0.5 / (expected + 1e-6)), rtol=1e-5, atol=0)


def _norms():
    for which in ([0, 1], [0, 2], [2, 3], [1, 4], [4], [0, 1, 2, 3, 4]):
        _norm(which)


def test_norm_is_that_of_the_whole_gradients():
    on_ranks(4, _norms)


class Mixed(nn.Module):
    """A parameter on each axis of the mesh, gathered where it is used, and a plain one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.a = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh["tp"], [Shard(0)]))
        self.b = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh["dp"], [Shard(0)]))
        self.c = nn.Parameter(torch.randn(4))

    def forward(self, x):
        a, b = (p.redistribute(placements=[Replicate()]).to_local() for p in (self.a, self.b))
        return torch.tanh(x @ a) @ b + self.c


def _captured():
    """All ranks have the same batch: the norm is that of the model on one rank."""
    model, x = Mixed(), torch.linspace(-1, 1, 12).view(3, 4)
    a, b = (p.detach().full_tensor().requires_grad_() for p in (model.a, model.b))
    c = model.c.detach().clone().requires_grad_()
    F.mse_loss(torch.tanh(x @ a) @ b + c, x).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in (a, b, c)]))
    step = stepgraph.capture(model, lambda m, x: F.mse_loss(m(x), x), x, max_grad_norm=0.1, passes="exact")
    step(x)
    torch.testing.assert_close(step.metrics["grad_norm"], expected, rtol=1e-6, atol=0)
    assert sorted(step.graph.axes.values()) == ["dp", "tp"]
    for param, whole in ((model.a, a), (model.b, b)):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad * (0.1 / expected), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_captured_with_parameters_on_two_meshes():
    on_ranks(4, _captured)

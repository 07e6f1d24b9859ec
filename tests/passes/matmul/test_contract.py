"""Sums of broadcast products as matrix products: the values, and what stays."""

import copy

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import StepOptions
from stepgraph.graph.provenance import phase_of

aten = torch.ops.aten
A, B, M, N, K = 2, 3, 8, 16, 32

#: What is summed of x (A, B, M, K) and y (A, B, N, K).
TAKEN = {
    "inner_last": lambda x, y: (x[:, :, :, None] * y[:, :, None]).sum(-1),
    "inner_in_the_middle": lambda x, y: (x.mT[..., None] * y.mT[:, :, :, None]).sum(2),
    "kept": lambda x, y: (x[:, :, :, None] * y[:, :, None]).sum(-1, keepdim=True),
    "expanded": lambda x, y: (x[:, :, :, None].expand(-1, -1, -1, N, -1) * y[:, :, None]).sum((-1, 1)),
    "one_alone": lambda x, y: (x[:, :, :, None] * y[:, :, None, :, :1]).sum((0, -1)),
    "fewer_dimensions": lambda x, y: (x[..., None, :] * y[0, 0]).sum(-1),
    "orders": lambda x, y: (y[:, :, :, None].transpose(0, 1) * x[:, :, None].transpose(0, 1)).sum(4),
    "views_of_the_sum": lambda x, y: (
        (y.permute(3, 2, 0, 1)[:, :, None] * x.permute(3, 2, 0, 1)[:, None]).sum(0).permute(2, 3, 0, 1).view(A * B, -1)
    ),
    "no_batch": lambda x, y: (x[0, 0][:, None] * y[0, 0]).sum(-1),
}
LEFT = {
    "a_weight_of_a_norm": lambda x, y: (x * y[:, :, :M]).sum(0),
    "a_row_times_a_matrix": lambda x, y: (x * y[:, :, :1]).sum(-1),
    "read_elsewhere": lambda x, y: (z := x[:, :, :, None] * y[:, :, None]).sum(-1) + z.amax(-1),
    "a_dimension_of_neither": lambda x, y: (
        x[:, :, :, None, None].expand(-1, -1, -1, -1, 4, -1) * y[:, :, None, :, None]
    ).sum(-1),
    "little_to_gain": lambda x, y: (x[..., :2, None, :2] * y[:, :, None, :2, :2]).sum(-1),
}


class Two(nn.Module):
    def __init__(self, function, dtype):
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.randn(A, B, n, K, dtype=dtype)) for n in (M, N))
        self.function = function

    def forward(self, scale):
        out = self.function(self.x * 1, self.y * 1).float()
        return (out * torch.linspace(0.5, 2, out.numel()).view(out.shape) * scale).sum()


def captured(function, dtype=torch.float32):
    """The captured step, gradients of it and of float64."""
    torch.manual_seed(0)
    model = Two(function, dtype)
    exact = copy.deepcopy(model).double()
    loss = exact(1.0)
    loss.backward()
    step = stepgraph.capture(
        model, lambda model, scale: model(scale), torch.tensor(1.0), passes=StepOptions(inductor="off")
    )
    found = step(torch.tensor(1.0))
    return step, [(found, loss.detach()), (model.x.grad, exact.x.grad), (model.y.grad, exact.y.grad)]


def changed(step):
    return next(r.changed for r in step.report if r.name == "contract_products")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAKEN)
def test_values_and_gradients(name, dtype):
    step, pairs = captured(TAKEN[name], dtype)
    bound = 2**-6 if dtype == torch.bfloat16 else 1e-5
    assert changed(step) >= 1
    assert any(n.target is aten.bmm.default for n in step.graph.graph.nodes)
    for mine, right in pairs[dtype == torch.bfloat16 :]:  # what cancels in the loss leaves bf16 few digits
        torch.testing.assert_close(mine.double(), right.double(), rtol=bound, atol=bound * float(right.abs().max()))


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name):
    step, pairs = captured(LEFT[name])
    assert not any(n.target is aten.bmm.default and phase_of(n) == "forward" for n in step.graph.graph.nodes)
    for mine, right in pairs:
        torch.testing.assert_close(mine.double(), right.double(), rtol=1e-4, atol=1e-4)

"""Integers of few bits, made of positions and constants, wrap in compiled code as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.inductor.integers import write_narrow_integers
from stepgraph.passes.compile.inductor import takes_sizes_for_scales

aten, arange = torch.ops.aten, torch.arange
WRAPPED = {
    "bool": lambda: (arange(8) - 4).bool(),
    "uint8": lambda: (arange(8) * 200).to(torch.uint8),
    "int8": lambda: (arange(8) * -1000).to(torch.int8),
    "int16": lambda: (arange(8, dtype=torch.int32) * 20000).to(torch.int16),
    "positions": lambda: arange(2, 130, 16, dtype=torch.uint8) * 3 - 100,
    "constants": lambda: torch.full((8,), 300).to(torch.uint8) + torch.full((8,), 200, dtype=torch.uint8),
    "sums": lambda: torch.full((8,), 200, dtype=torch.uint8).cumsum(0).to(torch.uint8),
    "chain": lambda: (arange(8) * 100).to(torch.int8).to(torch.int64).to(torch.uint8),
    "column": lambda: (arange(8)[:, None] * arange(8)).to(torch.int8, memory_format=torch.contiguous_format)[7],
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_written_computes_the_same(name):
    module = make_fx(WRAPPED[name], tracing_mode="fake")()
    write_narrow_integers(module.graph)
    module.recompile()
    expected, narrow = WRAPPED[name](), (torch.bool, torch.uint8, torch.int8, torch.int16)
    assert module().dtype == expected.dtype and torch.equal(module(), expected)
    for node in module.graph.find_nodes(op="call_function", target=aten.arange.start_step):
        assert node.meta["val"].dtype not in narrow
    for node in module.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        masked = node.args[0].target in (aten.bitwise_and.Scalar, aten.sub.Tensor, aten.ne.Scalar)
        assert node.meta["val"].dtype not in narrow or masked


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        for wrapped in WRAPPED.values():
            y = y + self.linear.bias * wrapped().float() / 100
        image = F.interpolate(y.view(1, 1, 4, 8), scale_factor=1.7, mode="nearest")
        return image.sin().mean() + F.interpolate(y.view(1, 1, 4, 8), scale_factor=2.0).cos().mean()


def test_gradients_by_a_scale_are_left_to_eager():
    def gradients(scale):
        step = stepgraph.capture(
            nn.Conv2d(1, 1, 1),
            lambda m, x: F.interpolate(m(x), scale_factor=scale).sin().mean(),
            torch.randn(1, 1, 4, 8),
            passes=[],
        )
        return step.graph.graph.find_nodes(op="call_function", target=aten.upsample_nearest2d_backward.default)

    left = {scale: bool(takes_sizes_for_scales(*gradients(scale))) for scale in (1.7, 1.5, 2.0, (2.0, 3.0), (2.0, 0.5))}
    assert left == {1.7: True, 1.5: True, 2.0: False, (2.0, 3.0): False, (2.0, 0.5): True}


@pytest.mark.long
def test_compiled_positions():
    model, x = Positions(), torch.randn(4, 8)
    loss = model(x)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    step = stepgraph.capture(model, lambda model, x: model(x), x, passes=["inductor"])
    torch.testing.assert_close(step(x), loss)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)

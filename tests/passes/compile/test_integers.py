"""Positions whose arithmetic leaves what their type holds are left to eager, and integers wrap as there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph.passes.compile.inductor import takes_sizes_for_scales
from stepgraph.passes.compile.integers import beyond

aten, arange, int32 = torch.ops.aten, torch.arange, torch.int32
LEFT = {
    "bool": lambda: (arange(8) - 4).bool(),
    "uint8": lambda: (arange(8) * 200).to(torch.uint8),
    "int8": lambda: (arange(8) * -1000).to(torch.int8),
    "int16": lambda: (arange(8, dtype=int32) * 20000).to(torch.int16),
    "positions": lambda: arange(2, 130, 16, dtype=torch.uint8) * 3 - 100,
    "sums": lambda: torch.full((8,), 200, dtype=torch.uint8).cumsum(0).to(torch.uint8),
    "chain": lambda: (arange(8) * 100).to(torch.int8).to(torch.int64).to(torch.uint8),
    "column": lambda: (arange(8)[:, None] * arange(8)).to(torch.int8, memory_format=torch.contiguous_format)[7] * 99,
    "product": lambda: arange(8, dtype=int32) * 1_000_000_007,
    "sum": lambda: arange(8, dtype=int32) + (2**31 - 5),
    "scaled": lambda: torch.add(arange(8, dtype=int32), arange(8, dtype=int32), alpha=10**9),
    "negated": lambda: -(arange(8, dtype=int32) + 2**31 - 8) * 3,
    "view": lambda: arange(48, dtype=int32).view(6, 8)[5] * 100_000_000,
    "power": lambda: arange(8, dtype=int32) ** 13,
    "square": lambda: arange(0, 80_000, 10_000) ** 2,  # in 32 bits on a GPU
    "shift": lambda: arange(8, dtype=int32) << 30,
    "64 bits": lambda: (arange(8) * 2**61 + 7) // 2**40,
    "float32": lambda: (arange(8) + 2**24).float() - 2**24,
    "float16": lambda: (arange(8) + 2048).half().float() - 2048,
    "bfloat16": lambda: arange(256, 264, dtype=torch.bfloat16).float() - 256,
    "divisor": lambda: (arange(8) - 4) % (arange(8) - 9),
}
KEPT = {
    "constants": lambda: torch.full((8,), 300).to(torch.uint8) + torch.full((8,), 200, dtype=torch.uint8),
    "mask": lambda: arange(4096)[:, None] >= arange(4096),
    "rotary": lambda: 1.0 / 10000 ** (arange(0, 64, 2).float() / 64),
    "window": lambda: (arange(64)[:, None] - arange(64)).abs().clamp(max=7).sum(1),
    "index": lambda: arange(4096) // 64 % 8 * 64 + arange(4096) % 64,
}


@pytest.mark.parametrize("name", LEFT | KEPT)
def test_positions_beyond_their_type_are_found(name):
    graph = make_fx((LEFT | KEPT)[name], tracing_mode="fake")().graph
    assert bool(beyond(graph)) == (name in LEFT)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        for made in (LEFT | KEPT).values():
            value = made().double()
            y = y + self.linear.bias * (value / (1 + value.abs().max())).float().flatten()[:8]
        y = y * torch.maximum(arange(8) > 3, arange(8) < 2) * ~torch.minimum(arange(8) > 6, y > 9)
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

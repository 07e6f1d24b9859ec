"""Concatenations that Inductor writes part by part: which they are, and that they are ``torch.cat``."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepgraph import compat
from stepgraph.costs.hardware import GPUS
from stepgraph.lower import StepSpec, lower
from stepgraph.passes import StepOptions, Target

ours = torch.ops.stepgraph


class Gated(nn.Module):
    """GELU gated in halves, and a fused projection unbound to three, of width ``width``."""

    def __init__(self, width):
        super().__init__()
        self.halves, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x):
        gate, up = self.halves(x).chunk(2, -1)
        x = x + self.out(F.gelu(gate) * up)
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, -1).unbind(-2)
        return q.sin() * k.cos() + v


class Grouped(nn.Module):
    """A fused projection to queries and fewer keys and values."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(width // 2, width, bias=False)
        self.half = width // 2

    def forward(self, x):
        q, k, v = self.qkv(x).split([2 * self.half, self.half, self.half], -1)
        return self.out(q[..., : self.half].sin() * k.cos() + v * q[..., self.half :].tanh())


class Rotated(nn.Module):
    """A concatenation that what Inductor compiles reads."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        a, b = (x * self.weight).chunk(2, -1)
        return torch.cat([-b, a], -1) * x


@pytest.mark.parametrize(
    ("model", "width", "options", "changed"),
    [
        (Gated, 512, {}, 2),
        (Gated, 64, {}, 0),  # in the cache
        (Grouped, 512, {}, 1),
        (Grouped, 192, {}, 0),  # whose keys are
        (Gated, 512, {"inductor": "regional"}, None),
        (Rotated, 2048, {}, 0),
    ],
)
def test_parts_that_are_computed_are_written_in_place(model, width, options, changed):
    with torch.device("meta"):
        built, x = model(width).bfloat16(), torch.empty(8, 1024, width, dtype=torch.bfloat16)
    spec = StepSpec(built, lambda model, x: model(x).float().mean(), x, passes=StepOptions(**options))
    step = lower(spec, Target.forecast(GPUS["h200"])).step
    report = next((report for report in step.log if report.name == "concat_in_place"), None)
    assert (report and report.changed) == changed
    assert len(step.calling(ours.concat.default)) == (changed or 0)


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_compiled_to_a_buffer_it_is_cat(dim, more):
    def computed(x, y):
        return (ours.concat.default([x.sin() * x, y.cos(), y], dim),)

    compat.lower_as_buffer(ours.concat.default)
    given = torch.randn(3, 4, 5), torch.randn([size + more * (d == dim) for d, size in enumerate((3, 4, 5))])
    graph = torch.fx.experimental.proxy_tensor.make_fx(computed, tracing_mode="fake")(*given)
    function = compat.inductor_compile(graph, given, {})
    source = compat.inductor_source(function)
    x, y = given
    torch.testing.assert_close(function([x, y])[0], torch.cat([x.sin() * x, y.cos(), y], dim))
    assert "stepgraph.concat" not in source.rpartition("def call(")[2]


def test_what_cannot_be_joined_is_refused():
    with pytest.raises(ValueError, match=r"float16.*one dtype"):
        ours.concat([torch.zeros(2), torch.zeros(2).half()], 0)

"""`stepgraph.region`: names on the nodes of forward and backward, and no other effect."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph.graph.edit import Builder
from stepgraph.graph.provenance import in_region, phase_of, provenance, region_of
from stepgraph.passes import run_passes
from stepgraph.regions import listening, region

aten = torch.ops.aten
MM, SIN, COS, EXP = aten.mm.default, aten.sin.default, aten.cos.default, aten.exp.default


class Cube(torch.autograd.Function):
    """Regions inside a function's forward and backward."""

    @staticmethod
    def forward(ctx, x):
        with region("cube"):
            ctx.save_for_backward(x)
            return x.pow(3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with region("cube"), region("slope"):
            return grad * 3 * x.pow(2)


class Marked(nn.Module):
    """``named``: whether its parts have regions; what it computes is the same."""

    def __init__(self, named=True, breaks=False):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.region = region if named else contextlib.nullcontext
        self.breaks = breaks

    def inner(self, x):
        with self.region("moe"):
            with self.region("dispatch-1"):
                x = self.one(x)
            x = x.sin()
        return x

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False)
        if self.breaks:
            with region("broken"):
                x = x.cos()
                torch._dynamo.graph_break()
                x = x.exp()
        with self.region("outer"):
            x = Cube.apply(self.two(x))
        return x.cos()


def loss_fn(model, x):
    out = model(x)
    with model.region("objective"):
        return out.exp().mean()


def captured(**options):
    torch.manual_seed(0)
    model = Marked(**options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, stepgraph.capture(model, loss_fn, torch.randn(3, 4), optimizer, passes=[])


def found(graph, phase, target):
    return [region_of(node) for node in graph.nodes(phase) if node.target is target]


def test_forward_and_backward_carry_the_names():
    _, step = captured()
    graph = step.graph
    assert found(graph, "forward", MM) == ["moe/dispatch-1", "outer"]
    assert found(graph, "forward", SIN) == ["moe"] and found(graph, "forward", COS) == [""]
    assert found(graph, "loss", EXP) == ["objective"]
    # Of the second product both gradients, of the first that of its weight.
    assert found(graph, "backward", MM) == ["outer", "outer", "moe/dispatch-1"]
    assert found(graph, "backward", COS) == ["moe"]  # of the sine
    assert found(graph, "backward", SIN) == [""]  # of the cosine
    assert [region_of(n) for n in graph.nodes("forward") if n.target is aten.pow.Tensor_Scalar] == ["outer/cube"]
    slope = [region_of(n) for n in graph.nodes("backward") if n.target is aten.pow.Tensor_Scalar]
    assert slope == ["outer/cube/slope"]
    assert not any(map(region_of, graph.nodes("optimizer")))
    line = next(line for line in graph.text().splitlines() if line.startswith("mm: "))
    assert line.endswith(" checkpoint 0 [moe/dispatch-1]")


def test_nodes_are_selected_at_any_depth_by_whole_names():
    _, step = captured()
    products = [n for n in step.graph.nodes() if n.target is MM]
    assert [in_region(n, "moe") for n in products] == [True, False, False, False, True]
    assert [in_region(n, "dispatch-1") for n in products] == [True, False, False, False, True]
    assert not any(in_region(n, "dispatch") or in_region(n, "patch-1") for n in products)


def test_new_nodes_and_passes_keep_them():
    _, step = captured()
    first, second = (n for n in step.graph.nodes("forward") if n.target is MM)
    sine = next(n for n in step.graph.nodes("forward") if n.target is SIN)
    with step.graph.graph.inserting_before(second):
        assert region_of(Builder(first)(aten.neg.default, sine)) == "moe/dispatch-1"
        assert region_of(Builder(first, sine)(aten.neg.default, sine)) == "moe"
        assert region_of(Builder(first, second)(aten.neg.default, sine)) == ""
    _, step = captured()
    run_passes(step.graph, ["recompute"])  # the checkpoint's sine is computed again in backward
    again = [n for n in step.graph.nodes("backward") if provenance(n).region == "moe/dispatch-1" and n.target is MM]
    assert len(again) == 2


def test_the_step_is_the_same_without_them():
    (marked, with_names), (plain, without) = captured(), captured(named=False)
    for a, b in zip(with_names.graph.nodes(), without.graph.nodes(), strict=True):
        assert (a.name, a.target, phase_of(a)) == (b.name, b.target, phase_of(b))
    for i in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(with_names(x), without(x))
    assert torch.equal(marked.one.weight, plain.one.weight)


def test_compile_sees_nothing():
    torch.compiler.reset()  # else what tests before compiled of the same code may serve
    x = torch.randn(3, 4)
    with region("around"):
        model = Marked()
        plain = loss_fn(model, x)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="eager")
    assert torch.equal(compiled(model, x), plain)
    graphs = []

    def count(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module

    model = Marked(breaks=True)
    assert torch.equal(torch.compile(model, backend=count)(x), model(x))
    assert len(graphs) == 2  # a break inside a region gives two graphs, not none


def test_names_open_outside_the_capture_do_not_count():
    with region("outside"):
        _, step = captured()
        with listening() as names:
            with region("a"), region("b"):
                assert names == ["a", "b"]
            with pytest.raises(KeyError), region("c"):
                raise KeyError
            assert names == []
    assert not any(in_region(n, "outside") for n in step.graph.nodes())


@pytest.mark.parametrize("name", ["", "moe/dispatch", "two words", None, 3, "[x]"])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match=r"^region .* is not a name: use letters, digits and '_-.', as in region"):
        region(name)

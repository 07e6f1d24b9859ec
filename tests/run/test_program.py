"""A step as a program: accumulation is a schedule over two graphs, and what flows between them."""

import copy
import itertools

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture import trace_step
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.graph.values import Accumulator
from stepgraph.run.memory import Memory


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def vectors(rows=8):
    return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 3)}


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_schedule(n):
    model = linear()
    program = trace_step(model, squares, vectors(), torch.optim.AdamW(model.parameters()), accumulate=n).program
    if n == 1:
        assert program.schedule == [Call(Kind.STEP, microbatch=0)]
        assert list(program.graphs) == ["step"]
    else:
        assert program.schedule == [*(Call(Kind.MICROBATCH, microbatch=k) for k in range(n)), Call(Kind.UPDATE)]
    assert program.microbatches == n
    assert program.main is program.graphs[program.schedule[0].graph]


def test_graphs_do_not_grow_with_the_number_of_microbatches():
    model = linear()
    sizes = []
    for n in (2, 4, 64):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        program = trace_step(model, squares, vectors(64), optimizer, max_grad_norm=1.0, accumulate=n).program
        sizes.append([len(graph.graph.nodes) for graph in program.graphs.values()])
    assert sizes[0] == sizes[1] == sizes[2]


def test_graphs_share_parameters_and_accumulators_alone():
    model = linear()
    program = trace_step(model, squares, vectors(), torch.optim.AdamW(model.parameters(), fused=True), accumulate=2)
    micro, update = program.program.graphs.values()
    kinds = [{spec.what.kind for spec in graph.inputs} for graph in (micro, update)]
    assert kinds == [{"parameter", "batch", "accumulator"}, {"parameter", "optimizer", "lr", "accumulator"}]
    names = [{spec.what.name for spec in graph.inputs if spec.what.kind == "accumulator"} for graph in (micro, update)]
    assert names[0] == names[1] == dict(model.named_parameters()).keys()


class SignedZeros(nn.Module):
    """Gradients of both zeros: which of them a sum gives depends on what it starts from."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.w * x).sum()


def test_signs_of_zeros_are_eagers():
    model = SignedZeros()
    batch = torch.tensor([[0.0, -0.0, 0.0, -0.0], [0.0, -0.0, -0.0, 1.0]])
    twin = copy.deepcopy(model)
    for row in batch.chunk(2):
        (twin(row[0]) / 2).backward()
    step = stepgraph.capture(model, lambda m, b: m(b[0]), batch, accumulate=2, passes="exact")
    step(batch)
    assert torch.equal(model.w.grad.view(torch.int32), twin.w.grad.view(torch.int32))
    assert torch.signbit(model.w.grad).tolist() == [False, True, False, False]


def test_a_parameter_that_the_loss_does_not_reach_has_no_accumulator():
    model = linear()
    model.unused = nn.Parameter(torch.ones(3))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    loss = lambda m, b: (m[2](m[1](m[0](b["x"]))) - b["y"]).square().mean()  # noqa: E731
    step = stepgraph.capture(model, loss, vectors(), optimizer, accumulate=2, passes="exact")
    step(vectors())
    assert model.unused.grad is None
    assert not optimizer.state.get(model.unused)
    for graph in step.graphs.values():
        assert {Accumulator("unused"), Accumulator("frozen")}.isdisjoint(spec.what for spec in graph.inputs)


def test_gradients_that_are_returned_are_not_the_accumulators():
    """A second step must not write into what the caller got from the first."""
    model, batch = linear(), vectors()
    step = stepgraph.capture(model, squares, batch, accumulate=4, passes="exact")
    step(batch)
    first = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: grad.clone() for name, grad in first.items()}
    model.zero_grad()
    step(vectors())
    assert all(torch.equal(first[name], kept[name]) for name in first)


def test_a_step_that_fails_leaves_nothing_behind(monkeypatch):
    """An update that never came: the next step begins with empty accumulators."""
    models = linear(), linear()
    batch = vectors()
    steps = [stepgraph.capture(m, squares, batch, accumulate=2, passes="exact") for m in models]
    runner = steps[0]._current.runner
    update = runner.runners["update"]

    def fail(flat):
        raise MemoryError

    runner.runners["update"] = fail
    with pytest.raises(MemoryError):
        steps[0](batch)
    runner.runners["update"] = update
    for step in steps:
        step(batch)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_forms_of_a_step_share_accumulators():
    model = linear()
    programs = [trace_step(model, squares, vectors(rows), accumulate=2).program for rows in (4, 8)]
    held = Memory()
    (flat, one), (other_flat, other) = map(held.accumulators, programs)
    assert flat[0] is other_flat[0]
    assert all(one[name] is other[name] for name in one)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in one.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_accumulators_lie_in_memory_as_gradients_do():
    """Transposed weights have gradients of their own layout; the optimizer reads memory linearly."""
    model = linear()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    program = trace_step(model, squares, vectors(), accumulate=2).program
    _, sums = Memory().accumulators(program)
    for name, param in model.named_parameters():
        assert sums[Accumulator(name)].stride() == param.stride()


class OwnSquare(torch.autograd.Function):
    """Half the sum of squares, whose backward hands on the parameter itself."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.square().sum() / 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


def with_zeroed_row(model, batch):
    w = model.weight.clone()
    w[0] = 0
    return (batch["x"][:, :3] @ w).square().mean()


def with_scaled_columns(model, batch):
    w = model.weight.clone()
    w[:, :2].mul_(3)
    return (batch["x"][:, :3] @ w).square().mean()


def decay_alone(model, batch):
    return OwnSquare.apply(model.weight)


@pytest.mark.parametrize("loss", [with_zeroed_row, with_scaled_columns, decay_alone])
def test_gradients_that_something_else_completes_or_holds(loss):
    """Backward finishes some gradients through views of them, and hands on tensors that the step was given."""
    model, batch = nn.Linear(6, 3, bias=False), vectors()
    twin = copy.deepcopy(model)
    for part in batch["x"].chunk(2):
        (loss(twin, {"x": part}) / 2).backward()
    stepgraph.capture(model, loss, batch, accumulate=2, passes="exact")(batch)
    assert torch.equal(model.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("disable, times", [((), 0), (("inductor",), 1)], ids=["compiled", "plain"])
def test_code_is_generated_for_what_is_called_alone(disable, times, monkeypatch):
    """Generating and compiling the code of a deep graph takes about a tenth as long as tracing it."""
    generated, generate = [], torch.fx.Graph.python_code

    def counted(graph, *args, **kwargs):
        generated.append(graph)
        return generate(graph, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Graph, "python_code", counted)
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    step = stepgraph.capture(model, squares, vectors(), optimizer, disable=disable)
    step(vectors())
    assert sum(graph is step.graph.graph for graph in generated) == times

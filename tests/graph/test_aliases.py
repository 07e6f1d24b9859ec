"""Views of numbers: what a complex tensor times a Python number is traced as. Inputs that share memory."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.capture.batch import shared_memory
from stepgraph.graph.aliases import Aliases
from stepgraph.passes import StepOptions
from stepgraph.passes.compile.cuda_graph import writes_into_shared


@pytest.mark.parametrize(
    "function",
    [
        lambda y: (torch.complex(y, y) * 1j).real,
        lambda y: (torch.fft.rfft(y) * (1 + 0.5j)).abs(),
        lambda y: torch.complex(y, y).conj() * 1j * torch.complex(y, -y),
        lambda y: torch.sgn(y * 1.0) * y + torch.sgn((y * 1.0).sum()),
    ],
)
def test_numbers_have_views(function):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def loss_fn(model, x):
        return function(model(x)).abs().square().mean()

    loss = loss_fn(model, x)
    (grad,) = torch.autograd.grad(loss, [model.weight])
    step = stepgraph.capture(model, loss_fn, x, passes="exact")
    assert torch.equal(step(x), loss) and torch.equal(model.weight.grad, grad)


class Block(nn.Module):
    """Reads ``scale``, and then writes into the same memory under another name."""

    def __init__(self, of):
        super().__init__()
        self.up, self.down, self.of = nn.Linear(4, 4), nn.Linear(4, 4), of
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("alias", self.up.weight.data if of == "parameter" else self.scale.view(2, 2))

    def forward(self, x, read, written):
        read = {"buffer": self.scale, "parameter": self.up.weight, "batch": read}[self.of]
        hidden = (x * (read * 2).sum(0)).tanh()
        (written if self.of == "batch" else self.alias).mul_(0.9)
        return self.down(self.up.bias + hidden.exp()) + x


class Blocks(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.layers = nn.ModuleList(Block(of) for _ in range(2))

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch["read"], batch["written"])
        return x.square().mean()


def batch(i, alias=True):
    rows = torch.linspace(-1, 1, 16).view(4, 4) + i
    return {"x": torch.ones(3, 4), "read": rows[:3], "written": (rows if alias else rows.clone())[1:]}


@pytest.mark.parametrize("of", ["buffer", "parameter", "batch"])
def test_what_is_written_under_another_name_is_not_computed_again(of):
    eager, captured = Blocks(of), Blocks(of)
    captured.load_state_dict(eager.state_dict())  # a copy of a parameter shares its memory with nothing
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, captured)]
    options = StepOptions(passes="exact", memory="full")
    step = stepgraph.capture(captured, lambda m, b: m(b), batch(0, alias=False), sgd[1], passes=options)
    for i, alias in enumerate((True, True, False)):
        sgd[0].zero_grad()
        loss = eager(batch(i, alias))
        loss.backward()
        sgd[0].step()
        assert torch.equal(step(batch(i, alias)), loss)
        assert all(map(torch.equal, eager.state_dict().values(), captured.state_dict().values()))


@pytest.mark.parametrize("alias", [True, False])
def test_static_buffers_cannot_hold_what_a_step_writes_into_shared_memory(alias):
    step = stepgraph.capture(Blocks("batch"), lambda m, b: m(b), batch(0, alias), passes="exact")
    assert writes_into_shared(step.graph) is alias
    step = stepgraph.capture(Blocks("buffer"), lambda m, b: m(b), batch(0), passes="exact")
    assert not writes_into_shared(step.graph)


def test_a_step_that_is_left_out_puts_all_of_a_shared_buffer_back():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, whole = nn.Linear(4, 4), torch.ones(12)
            self.register_buffer("part", whole[:4])
            self.register_buffer("whole", whole)

        def forward(self, x):
            self.whole.mul_(2)
            return (self.linear(x) * self.part).square().mean()

    model, x = Model(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = stepgraph.capture(model, lambda m, x: m(x), x, optimizer, on_nonfinite="skip", passes="exact")
    step(x * float("inf"))
    assert step.metrics["skipped"] and torch.equal(model.whole, torch.ones(12))
    step(x)
    assert not step.metrics["skipped"] and torch.equal(model.whole, torch.full((12,), 2.0))


def test_views_of_one_tensor_are_one_form_unless_they_overlap():
    data = torch.randn(40, 4)
    assert shared_memory([data[0:3], data[10:13]]) == shared_memory([data[20:23], data[3:6]]) == []
    assert shared_memory([data[0:3], data[2:5]]) == [(0, 1, 2 * 4 * 4)]
    assert shared_memory([data[:, :2], data[:0], data[:, 2:]]) == [
        (0, 2, 2 * 4)
    ]  # rows of each lie between the other's
    assert shared_memory([data[:, :2], data.clone(), data[5]]) == [(0, 2, 5 * 4 * 4)]


def test_inputs_that_lie_next_to_each_other_share_nothing():
    model, flat = nn.Linear(4, 4), torch.randn(20)
    model.weight, model.bias = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:])
    model.register_buffer("alias", flat[15:17])
    for name in ("weight", "bias"):
        graph = stepgraph.capture(model, lambda m, x: m(x).sum(), torch.randn(2, 4), passes=[]).graph.graph
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        aliases = Aliases(graph)
        roots = [aliases.root(node) for node in inputs.values()]
        assert len(roots) - len(set(roots)) == (2 if name == "weight" else 0)
        model.alias = torch.zeros(2)


class Statistics(nn.Module):
    """Running statistics by operators whose schemas do not say that they write them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        y = self.linear(x)
        torch.batch_norm_update_stats(y.detach(), self.mean, self.var, 0.1)
        return (y - self.mean).square().mean()


@pytest.mark.parametrize(
    "passes", [StepOptions(passes="exact", memory="full"), ["inductor"]], ids=["exact", "inductor"]
)
def test_running_statistics_of_schemas_without_writes(passes):
    eager, captured, x = Statistics(), Statistics(), torch.randn(3, 4)
    captured.load_state_dict(eager.state_dict())
    step = stepgraph.capture(captured, lambda m, x: m(x), x, passes=passes)
    for _ in range(2):
        torch.testing.assert_close(step(x), eager(x).detach())
    torch.testing.assert_close(captured.state_dict(), eager.state_dict())

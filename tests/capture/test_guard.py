"""A step whose update is left out changes no bit; with the condition false, the guard changes none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.capture import guard as conditions
from stepgraph.capture import trace_step
from stepgraph.verify.state import State
from tests.capture.conftest import assert_same_state, eager_step
from tests.capture.test_optimizers import KINDS, Mixed


class Counting(nn.Module):
    """Writes its state in forward in every way: a buffer in place, one through a view, one assigned, a parameter that
    is not trained, and a trained one."""

    def __init__(self, scales=True):
        super().__init__()
        self.inner, self.scales = Mixed(), scales
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("viewed", torch.zeros(2, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        y = self.norm(self.inner(x))
        self.assigned = self.assigned + x.detach().mean()
        self.viewed[1].add_(1.0)
        self.frozen.mul_(1.5)
        if self.scales:
            with torch.no_grad():
                self.inner.scale.mul_(0.99)
        return y * self.frozen.sum()


def loss_of(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def batches(n, rows=4):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [{"x": draw(rows, 2, 3, 3), "y": draw(rows, 5)} for _ in range(n)]


def spoiled(batch, what=float("nan")):
    """``batch`` with one target that makes loss and gradients not finite."""
    y = batch["y"].clone()
    y[-1, 0] = what
    return batch | {"y": y}


def state_of(model, optimizer):
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return State(model, optimizers, []).read()


def assert_same(a, b, what=""):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), (what, key)


ALL = KINDS | {"master": lambda model: stepgraph.MasterAdamW(model.parameters(), lr=0.01)}


#: One for each way in which an update is written.
WAYS = {name: ALL[name] for name in ("adamw", "adam_fused", "sgd_dampened", "sgd_fused", "muon", "adafactor", "master")}
OTHERS = {name: make for name, make in ALL.items() if name not in WAYS}


@pytest.mark.parametrize(
    "make", [*WAYS.values(), *(pytest.param(m, marks=pytest.mark.long) for m in OTHERS.values())], ids=[*WAYS, *OTHERS]
)
def test_a_step_left_out_changes_nothing(make):
    check_left_out(make, 1)


def test_accumulated_steps_left_out_change_nothing():
    check_left_out(ALL["master"], 2)


@pytest.mark.long
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_accumulated_steps_left_out_change_nothing_by_any_optimizer(make):
    check_left_out(make, 2)


def check_left_out(make, accumulate):
    """A spoiled step, the first one too, leaves the bits of before it; others have those of eager."""
    torch.manual_seed(0)
    # Eager makes master weights in its first update, what forward writes into weights before it included.
    master = make is ALL["master"]
    dtype = torch.bfloat16 if master else torch.float32
    eager = Counting(scales=not master).to(dtype)
    model = copy.deepcopy(eager)
    optimizers = make(eager), make(model)
    data = [{k: v.to(dtype) for k, v in batch.items()} for batch in batches(3)]
    step = stepgraph.capture(
        model,
        loss_of,
        data[0],
        optimizers[1],
        max_grad_norm=0.1,
        accumulate=accumulate,
        on_nonfinite="skip",
        passes="exact",
    )
    for i, batch in enumerate(data):
        before = state_of(model, optimizers[1])
        assert not torch.isfinite(step(spoiled(batch, (float("nan"), float("inf"))[i % 2])))
        assert step.metrics["skipped"]
        assert_same(before, state_of(model, optimizers[1]), i)
        loss, norm = eager_step(eager, loss_of, batch, optimizers[0], 0.1, accumulate)
        assert torch.equal(step(batch), loss) and not step.metrics["skipped"]
        assert torch.equal(step.metrics["grad_norm"], norm)
        assert_same_state(eager, model, i)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_without_a_condition_hold_no_guard(accumulate):
    model = Counting()
    program = trace_step(model, loss_of, batches(1)[0], torch.optim.AdamW(model.parameters()), accumulate=accumulate)
    for graph in program.program.graphs.values():
        assert {"before", "ratio"}.isdisjoint(spec.what.kind for spec in graph.inputs)
        assert all(what.kind != "ratio" and what.name != "skipped" for what in graph.outputs)


def test_only_what_forward_writes_is_kept():
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    traced = trace_step(model, loss_of, batches(1)[0], optimizer, max_grad_norm=1.0, accumulate=2, skip_nonfinite=True)
    for name, graph in traced.program.graphs.items():
        kept = {spec.what.name for spec in graph.inputs if spec.what.kind == "before"}
        written = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "assigned", "viewed"}
        assert kept == (set() if name == "microbatch" else written | {"frozen", "inner.scale"})


def test_verify_knows_skipped_steps():
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = stepgraph.capture(model, loss_of, batches(1)[0], optimizer, on_nonfinite="skip", passes="exact")
    (good,) = batches(1)
    assert step.verify(good).bitwise


def test_what_is_refused():
    model = Counting()
    with pytest.raises(ValueError, match="there is no optimizer; pass optimizer="):
        stepgraph.capture(model, loss_of, batches(1)[0], on_nonfinite="skip")
    with pytest.raises(ValueError, match="on_nonfinite"):
        stepgraph.capture(model, loss_of, batches(1)[0], torch.optim.SGD(model.parameters(), 0.1), on_nonfinite="stop")


class Buffered(nn.Module):
    """Reads as many rows as its buffer has room for, and says how full it is, as buffers of experts do."""

    def __init__(self, room):
        super().__init__()
        self.weight, self.room = nn.Parameter(torch.ones(6)), room
        self.register_buffer("calls", torch.zeros(()))

    def grow(self, ratio):
        while ratio > 1:
            self.room, ratio = self.room * 2, ratio / 2

    def forward(self, x):
        used = x[:, 0] > 0
        conditions.require("room", used.sum().double() / self.room, self.grow)
        self.calls.add_(1)
        y = (x * used.unsqueeze(1))[: self.room] * self.weight.expand(len(x), 6)[: self.room]
        return F.dropout(F.pad(y, (0, 0, 0, len(x) - len(y))), 0.5)


def rows(used, n=16):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(used))
    x[:, 0] = torch.where(torch.arange(n) < used, 1.0, -1.0)
    return {"x": x}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_step_that_exceeds_a_condition_is_repeated(accumulate, with_optimizer):
    """Bit for bit what larger buffers from the start would have given, random numbers included."""
    found = []
    for room in (2, 64):
        model = Buffered(room)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) if with_optimizer else None
        step = stepgraph.capture(
            model, lambda m, b: m(b["x"]).square().sum(), rows(0), optimizer, accumulate=accumulate, passes="exact"
        )
        torch.manual_seed(5)
        outcomes = [(step(rows(used)), int(step.metrics["repeated"])) for used in (1, 2, 7, 3, 16)]
        found.append(
            (outcomes, model.room, [*model.buffers(), *(p if p.grad is None else p.grad for p in model.parameters())])
        )
    (small, room, state), (large, _, expected) = found
    assert [n for _, n in large] == [0] * 5
    # Seven rows need room for eight. In two microbatches of eight rows each, that is enough for all later ones.
    assert ([n for _, n in small], room) == (([0, 0, 1, 0, 0], 8) if accumulate == 2 else ([0, 0, 1, 0, 1], 16))
    for (a, _), (b, _) in zip(small, large, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(state, expected, strict=True):
        assert torch.equal(a, b)

"""Every optimizer that a graph can hold, against torch's own, bit for bit."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

import stepgraph
from stepgraph.capture.optimizer.rule import MasterAdamW
from stepgraph.capture.optimizer.update import Update
from stepgraph.lower import lowering

optim = torch.optim


class Mixed(nn.Module):
    """Matrices of both orientations, vectors, a kernel of four dimensions, and a parameter of none."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.wide, self.tall = nn.Linear(12, 17), nn.Linear(17, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.tall(self.wide(self.conv(x).flatten(1)).tanh()) * self.scale.exp()


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs(dtype=torch.float32, n=2):
    return [{"x": torch.randn(4, 2, 3, 3, dtype=dtype), "y": torch.randn(4, 5, dtype=dtype)} for _ in range(n)]


def muon_and_adamw(model, **options):
    """As people use Muon: it takes the matrices, AdamW the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [optim.Muon(matrices, **{"lr": 0.02, **options}), optim.AdamW(rest, lr=3e-3)]


def of(kind, **options):
    return lambda model: kind(model.parameters(), **{"lr": 0.01, **options})


KINDS = {
    "adamw": of(optim.AdamW),
    "adam": of(optim.Adam, weight_decay=0.1),
    "adam_fused": of(optim.Adam, weight_decay=0.1, fused=True),
    "adamw_foreach": of(optim.AdamW, foreach=True, weight_decay=0.1),
    "sgd": of(optim.SGD),
    "sgd_momentum": of(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_foreach": of(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "sgd_dampened": of(optim.SGD, momentum=0.9, dampening=0.3),
    "sgd_fused": of(optim.SGD, momentum=0.9, fused=True),
    "muon": muon_and_adamw,
    "muon_plain": functools.partial(muon_and_adamw, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "adafactor": of(optim.Adafactor, weight_decay=0.1),
    "adafactor_foreach": of(optim.Adafactor, weight_decay=0.1, foreach=True),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training(check_training, make, dtype):
    if make is KINDS["sgd_fused"] and dtype == torch.bfloat16:
        pytest.skip("torch's kernel reads memory that it has not written, for sizes that no vector divides")
    check_training(Mixed().to(dtype), mse, pairs(dtype), make, max_grad_norm=0.3, steps=5)


@each_kind
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accumulation(check_training, make, clip):
    check_training(Mixed(), mse, pairs(), make, max_grad_norm=clip, accumulate=2, steps=3)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (x + 0.5j) @ self.weight.T


COMPLEX = ("adamw", "adam", "adamw_foreach", "sgd", "sgd_momentum", "sgd_dampened", "sgd_foreach")


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_parameters(check_training, kind):
    def loss(model, x):
        return (model(x["x"]).abs() + model.bias).square().mean()

    batches = [{"x": torch.randn(3, 7)} for _ in range(2)]
    check_training(Complex(), loss, batches, KINDS[kind], max_grad_norm=0.3)


@settings(
    phases=(Phase.explicit, Phase.generate),
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_options(check_training, data):
    """Options and starts that nobody chose."""
    draw = data.draw
    kind = draw(st.sampled_from([optim.Adam, optim.AdamW, optim.SGD, optim.Muon, optim.Adafactor]))
    options = {"lr": draw(st.floats(1e-6, 0.1)), "weight_decay": draw(st.sampled_from([0.0, 1e-4, 0.3]))}
    if kind is not optim.Muon:
        options |= {"maximize": draw(st.booleans()), "foreach": draw(st.sampled_from([None, False, True]))}
    beta = st.floats(0.0, 0.999)
    if kind in (optim.Adam, optim.AdamW):
        options |= {"betas": (draw(beta), draw(beta)), "eps": draw(st.sampled_from([1e-8, 1e-3]))}
    elif kind is optim.SGD:
        options |= {"momentum": draw(st.floats(0.1, 0.99))}
        options |= draw(st.sampled_from([{}, {"nesterov": True}, {"dampening": 0.37}]))
    elif kind is optim.Muon:
        options |= {"momentum": draw(beta), "nesterov": draw(st.booleans()), "ns_steps": draw(st.integers(1, 6))}
        options |= {"adjust_lr_fn": draw(st.sampled_from([None, "original", "match_rms_adamw"]))}
    else:
        options |= {"beta2_decay": draw(st.sampled_from([-0.8, -0.5, -1.0])), "d": draw(st.floats(1.0, 3.0))}
        options |= {"eps": draw(st.sampled_from([(None, 1e-3), (1e-5, 0.1)]))}
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    torch.manual_seed(draw(st.integers(0, 99)))

    def make(model):
        if kind is optim.Muon:
            return muon_and_adamw(model, **options)
        return kind(model.parameters(), **options)

    clip = draw(st.sampled_from([None, 0.1]))
    check_training(Mixed().to(dtype), mse, pairs(dtype), make, max_grad_norm=clip, steps=4)


class Partial(nn.Module):
    """Has frozen parameters, tied ones, and one that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.used.weight

    def forward(self, x):
        return self.tied(self.frozen(self.used(x)).tanh())


@each_kind
def test_frozen_tied_and_unused_parameters(check_training, make):
    batches = [{"x": torch.randn(4, 6), "y": torch.randn(4, 6)} for _ in range(2)]
    check_training(Partial(), mse, batches, make, max_grad_norm=0.1, steps=4)


def test_parameters_of_no_optimizer_land_and_count_in_the_norm(check_training):
    def make(model):
        return [optim.Muon([model.wide.weight], lr=0.02), optim.SGD([model.wide.bias], lr=0.1)]

    check_training(Mixed(), mse, pairs(), make)
    step = check_training(Mixed(), mse, pairs(), make, max_grad_norm=0.1, steps=1)
    landed = {spec.name for spec in step.graph.outputs if spec.kind == "grad"}
    assert landed == {"scale", "conv.weight", "conv.bias", "tall.weight", "tall.bias"}


SCHEDULES = {
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "one_cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda i: min(1.0, (i + 1) / 3)),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", ["adam", "sgd_momentum", "sgd_fused", "muon", "adafactor"])
def test_schedules_need_no_recapture(check_training, kind, schedule, monkeypatch):
    traces = []
    trace_step = lowering.trace_step
    monkeypatch.setattr(lowering, "trace_step", lambda *a, **k: traces.append(1) or trace_step(*a, **k))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that steps before its optimizer
        check_training(Mixed(), mse, pairs(), KINDS[kind], make_schedule=schedule, steps=6)
    assert len(traces) == 1


def listed(optimizers):
    return optimizers if isinstance(optimizers, list) else [optimizers]


@pytest.mark.parametrize(
    "make",
    [*KINDS.values(), of(optim.AdamW, fused=True), of(MasterAdamW)],
    ids=[*KINDS, "adamw_fused", "master"],
)
@pytest.mark.parametrize("captured_first", [False, True])
def test_state_dict_between_eager_and_captured(make, captured_first):
    """Train, hand model and optimizers over through their state dicts, train on: as one eager run."""
    batches = pairs()
    start = Mixed()

    def train(model, optimizers, captured):
        if captured:
            step = stepgraph.capture(model, mse, batches[0], optimizers, passes="exact")
        for batch in batches:
            if captured:
                step(batch)
                continue
            mse(model, batch).backward()
            for optimizer in listed(optimizers):
                optimizer.step()
                optimizer.zero_grad()

    reference = copy.deepcopy(start)
    optimizers = make(reference)
    for _ in range(2):
        train(reference, optimizers, False)

    first, second = copy.deepcopy(start), Mixed()
    givers, takers = make(first), make(second)
    train(first, givers, captured_first)
    second.load_state_dict(first.state_dict())
    for giver, taker in zip(listed(givers), listed(takers), strict=True):
        taker.param_groups[0]["lr"] = 0.5  # which it gets from the other
        taker.load_state_dict(giver.state_dict())
    train(second, takers, not captured_first)
    assert all(map(torch.equal, reference.parameters(), second.parameters()))


class MemoryEnds(TorchFunctionMode):
    """The ``n``-th tensor that is made inside finds no memory."""

    def __init__(self, n):
        self.left = n

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.zeros, torch.zeros_like, torch.Tensor.new_zeros, torch.Tensor.to):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [*KINDS.values(), of(MasterAdamW)], ids=[*KINDS, "master"])
def test_captures_after_one_that_found_no_memory_for_state(make, monkeypatch):
    model = Mixed()
    plain = copy.deepcopy(model)
    (optimizer, *others), (expected, *rest) = (
        got if isinstance(got := make(m), list) else [got] for m in (model, plain)
    )
    (batch,) = pairs(n=1)
    init_state = Update.init_state
    for n in range(1, 7):
        ends = MemoryEnds(n)

        def limited(*given, ends=ends):
            with ends:
                return init_state(*given)

        monkeypatch.setattr(Update, "init_state", limited)
        try:
            stepgraph.capture(model, mse, batch, [optimizer, *others], passes="exact")
        except torch.OutOfMemoryError:
            continue
        assert ends.left > 0
        break
    monkeypatch.setattr(Update, "init_state", init_state)
    stepgraph.capture(model, mse, batch, [optimizer, *others], passes="exact")(batch)
    stepgraph.capture(plain, mse, batch, [expected, *rest], passes="exact")(batch)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_orthogonalization_stays_visible():
    model = Mixed()
    step = stepgraph.capture(model, mse, pairs()[0], muon_and_adamw(model), passes="exact")
    products = [n for n in step.graph.nodes("optimizer") if "mm" in str(n.target)]
    assert len(products) == 2 * 5 * 3  # two matrices, five iterations of three products
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in products)


@each_kind
def test_an_eager_step_between_the_capture_and_its_first_call(make):
    """It finds the state that the capture made, and so does a capture for a new shape."""
    results, start, batches = [], Mixed(), pairs(n=4)
    for captured in (False, True):
        model = copy.deepcopy(start)
        optimizers = made if isinstance(made := make(model), list) else [made]
        step = stepgraph.capture(model, mse, batches[0], optimizers, passes="exact") if captured else None
        for i, batch in enumerate(batches):
            batch = {key: value[: 4 - i % 2] for key, value in batch.items()}
            if captured and i:
                step(batch)
                continue
            mse(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: [], "list of optimizers is empty; pass None"),
        (lambda m: [optim.SGD(m.parameters()), optim.Adagrad(m.parameters())], "is in SGD and in Adagrad; pass it to"),
        (
            lambda m: [optim.SGD(m.parameters()), optim.Adam(m.tall.parameters())],
            "is in SGD and in Adam; pass it to one",
        ),
        (of(optim.SGD, differentiable=True), r"SGD\(differentiable=True\) keeps the history"),
        (of(optim.SGD, fused=True, momentum=0.9, dampening=0.1), "use fused=False"),
        (of(optim.Adafactor, lr=torch.tensor(0.1)), r"Adafactor.step .*adafactor.py:\d+.*tensor.s value"),
    ],
)
def test_refusals(make, message):
    model = Mixed()
    with pytest.raises(ValueError, match=message) as error:
        stepgraph.capture(model, mse, pairs()[0], make(model), passes="exact")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of(optim.Adafactor), "Adafactor takes no complex parameters"),
        (lambda m: optim.Muon([m.weight]), r"Muon.step \(.*_muon.py:\d+\)"),
        (of(optim.AdamW, fused=True), r"AdamW\(fused=True\) takes no complex parameters.*use fused=False"),
    ],
)
def test_complex_parameters_are_refused(make, message):
    model = Complex()
    with pytest.raises(ValueError, match=message):
        stepgraph.capture(model, lambda m, x: m(x).abs().mean(), torch.randn(3, 7), make(model), passes="exact")

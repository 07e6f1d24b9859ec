"""The optimizer inside the graph: every option of AdamW that can be captured, bit for bit; the others refused."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph
from stepgraph.lower import lowering


def mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def pairs(n=3):
    return [{"x": torch.randn(4, 6), "y": torch.randn(4, 6)} for _ in range(n)]


def capture(model, optimizer, **options):
    return stepgraph.capture(model, mse, pairs(1)[0], optimizer, passes="exact", **options)


KINDS = {
    "unfused": torch.optim.AdamW,
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "master": stepgraph.MasterAdamW,
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@each_kind
@pytest.mark.parametrize("maximize", [False, True])
def test_options(check_training, make, maximize):
    def optimizer(model):
        return make(model.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, maximize=maximize)

    check_training(mlp(), mse, pairs(), optimizer, max_grad_norm=0.1)


@each_kind
def test_parameter_groups(check_training, make):
    def optimizer(model):
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        return make(
            [{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1, "weight_decay": 0.0}], lr=0.01
        )

    check_training(mlp(), mse, pairs(), optimizer)


class Partial(nn.Module):
    """Has a frozen parameter, and parameters that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x)).tanh()


@each_kind
def test_frozen_and_unused_parameters(check_training, make):
    step = check_training(Partial(), mse, pairs(), lambda m: make(m.parameters(), lr=0.01), max_grad_norm=0.1)
    stateful = {s.what.name.rpartition(".")[0] for s in step.graph.inputs if s.what.kind == "optimizer"}
    assert stateful == {"used.weight", "used.bias"}


@each_kind
def test_gradients_of_parameters_outside_the_optimizer_land(check_training, make):
    step = check_training(mlp(), mse, pairs(), lambda m: make([m[0].weight, m[2].bias], lr=0.01))
    assert [s.name for s in step.graph.outputs if s.kind == "grad"] == ["0.bias", "2.weight"]


@each_kind
def test_schedule_needs_no_recapture(check_training, make, monkeypatch):
    traces = []
    trace_step = lowering.trace_step
    monkeypatch.setattr(lowering, "trace_step", lambda *a, **k: traces.append(1) or trace_step(*a, **k))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule that steps before its optimizer
        check_training(
            mlp(),
            mse,
            pairs(),
            lambda m: make(m.parameters(), lr=0.1),
            make_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        )
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_learning_rate(check_training, dtype):
    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, dtype=dtype), fused=True)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    check_training(mlp(), mse, pairs(), optimizer, make_schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_far_into_a_run(dtype, fused):
    """After thousands of steps the bias corrections are other numbers; parameters may have seen different counts."""
    batches, results = pairs(), []
    batches = [{k: v.to(dtype) for k, v in b.items()} for b in batches]
    start = mlp().to(dtype)
    for captured in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        for i, p in enumerate(model.parameters()):
            state = {"step": torch.tensor(4321.0 + i % 2), "exp_avg": p.detach() * 0.1, "exp_avg_sq": p.detach() ** 2}
            optimizer.state[p] = state
        step = stepgraph.capture(model, mse, batches[0], optimizer, passes="exact") if captured else None
        for i in range(10):
            if captured:
                step(batches[i % 3])
                continue
            mse(model, batches[i % 3]).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())])
    assert all(map(torch.equal, *results))


def test_master_weights_are_not_rounded_by_load_state_dict():
    model = mlp().bfloat16()
    optimizer = stepgraph.MasterAdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(4, 6).bfloat16()
    step = stepgraph.capture(model, lambda m, x: m(x).square().mean(), batch, optimizer, passes="exact")
    step(batch)
    copied = stepgraph.MasterAdamW(copy.deepcopy(model).parameters(), lr=1e-4)
    copied.load_state_dict(optimizer.state_dict())
    for a, b in zip(optimizer.state.values(), copied.state.values(), strict=True):
        assert all(t.dtype == torch.float32 for t in b.values())
        assert all(torch.equal(a[k], b[k]) and a[k] is not b[k] for k in a)


def test_master_adamw_is_adamw_in_fp32():
    """On fp32 parameters, torch's own AdamW is the reference."""
    start, batches = mlp(), pairs()
    results = []
    for make in (stepgraph.MasterAdamW, functools.partial(torch.optim.AdamW, fused=True)):
        model = copy.deepcopy(start)
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.1)
        for batch in batches:
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS.step .*lbfgs.py.*closure"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), r"AdamW\(fused=True\) takes the learning rate"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), r"AdamW\(differentiable=True\)"),
        (lambda p: torch.optim.AdamW(p, capturable=True, foreach=True, lr=torch.tensor(0.1)), "capturable=True"),
        (
            lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
            "a parameter of shape .3. that the model does not",
        ),
    ],
)
def test_optimizers_that_are_refused(make, message):
    model = mlp()
    with pytest.raises(ValueError, match=message) as error:
        capture(model, make(model.parameters()))
    assert "\n" not in str(error.value)


def test_step_hooks_are_refused():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        capture(model, optimizer)


class Scaling(torch.optim.SGD):
    """To be replaced after the capture."""


def test_a_step_that_is_replaced_is_refused():
    model, (batch, *_) = mlp(), pairs()
    optimizer = torch.optim.AdamW(model.parameters())
    step = capture(model, optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # notes in a step of its own that one ran
    step(batch)
    optimizer.step = lambda: None
    for call in (lambda: step(batch), lambda: capture(model, optimizer)):
        with pytest.raises(ValueError, match="step was replaced on the optimizer object"):
            call()
    optimizer = Scaling(model.parameters())
    step = capture(model, optimizer)
    Scaling.step = lambda self: None
    with pytest.raises(ValueError, match="replaced after the capture"):
        step(batch)


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_converted_after_its_first_step(fused):
    """As eager, in one line."""
    model, batch = mlp(), pairs(1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    step = capture(model, optimizer)
    step(batch)
    model.double()
    double = {name: value.double() for name, value in batch.items()}
    mse(model, double).backward()
    with pytest.raises(RuntimeError, match=r"dtype|expected scalar type"):
        optimizer.step()
    model.zero_grad()
    known = r"is torch.float64 and its state in AdamW torch.float32.*build the optimizer"
    with pytest.raises(ValueError, match=known if fused else r"AdamW.step \(.*adam.py:\d+\).*dtype") as error:
        step(double)
    assert "\n" not in str(error.value)


def test_a_changed_option_is_captured_again(check_training):
    start, batches = mlp(), pairs()
    results = []
    for captured in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = capture(model, optimizer) if captured else None
        for i in range(4):
            if i == 2:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            if captured:
                step(batches[0])
                continue
            mse(model, batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


def test_a_parameter_whose_elements_share_memory():
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(torch.randn(8).as_strided((4, 4), (1, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        stepgraph.CaptureError, match=r"elements of a parameter of shape \[4, 4\] and strides \[1, 1\] share"
    ):
        stepgraph.capture(model, lambda m, x: m(x).square().mean(), torch.randn(3, 4), optimizer)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("strides", [(2, 3), (1, 5)])
def test_a_parameter_with_gaps_between_its_elements(strides, fused):
    """Its gradient is contiguous; with strides of (2, 3) its elements interleave, and share no memory."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(2, 3), torch.randn(4, 2)
        model.weight = torch.nn.Parameter(torch.randn(12).as_strided((3, 2), strides))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        step = stepgraph.capture(model, loss_of, x, optimizer, passes="exact") if captured else None
        for _ in range(3):
            if captured:
                step(x)
                continue
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())])
    assert all(map(torch.equal, *ends))


def test_a_rate_in_numpys_precision():
    numpy = pytest.importorskip("numpy")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=numpy.float32(0.01))
    with pytest.raises(ValueError, match=r"AdamW has lr=np.float32\(0.01\), .* use lr=float"):
        stepgraph.capture(model, lambda m, x: m(x).square().mean(), torch.randn(3, 4), optimizer)


def test_a_limit_in_a_tensor_that_changes():
    eager = torch.nn.Linear(4, 4)
    captured, x = copy.deepcopy(eager), torch.randn(3, 4)
    limit = torch.tensor(0.3)
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, captured)]
    step = stepgraph.capture(captured, loss_of, x, sgd[1], max_grad_norm=limit, passes="exact")
    for value in (0.3 / k for k in range(1, 40)):
        limit.fill_(value)
        sgd[0].zero_grad()
        loss_of(eager, x).backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), limit)
        sgd[0].step()
        step(x)
        assert all(map(torch.equal, eager.parameters(), captured.parameters()))


def loss_of(model, x):
    return model(x).square().mean()

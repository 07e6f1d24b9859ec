"""What a user does to an optimizer between two captured steps: taken as eager takes it, or refused in one line."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph


def loss_fn(model, batch):
    return F.mse_loss(model(batch), batch.flip(0))


BATCH = torch.linspace(-2, 2, 24).view(4, 6)


def model():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def swap_groups(model, optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def replace_moments(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def replace_counts(model, optimizer):
    for state in optimizer.state.values():
        state["step"] = torch.tensor(7.0)


def widen_second_moments(model, optimizer):
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()


def set_one_count(model, optimizer):
    optimizer.state[model[2].bias]["step"].fill_(9.0)


@pytest.mark.parametrize("change", [swap_groups, replace_moments, replace_counts, set_one_count, widen_second_moments])
@pytest.mark.parametrize("kind", [adamw, torch.optim.Adafactor])
def test_groups_and_state(change, kind):
    if change in (replace_moments, widen_second_moments) and kind is not adamw:
        kind = torch.optim.Adam
    start, ends = model(), []
    for captured in (False, True):
        twin = copy.deepcopy(start)
        layers = [{"params": [layer.weight, layer.bias], "lr": lr} for layer, lr in ((twin[0], 0.1), (twin[2], 0.01))]
        optimizer = kind(layers)
        step = stepgraph.capture(twin, loss_fn, BATCH, optimizer, passes="exact") if captured else None
        for i in range(4):
            if i == 2:
                change(twin, optimizer)
            if captured:
                step(BATCH)
                continue
            loss_fn(twin, BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*twin.parameters(), *(state["step"] for state in optimizer.state.values())])
    assert all(map(torch.equal, *ends))


def test_verify_causes_no_capture():
    twin = model()
    step = stepgraph.capture(twin, loss_fn, BATCH, adamw(twin.parameters()), passes="exact")
    step(BATCH)
    before = step.program
    assert step.verify(BATCH).bitwise
    step(BATCH)
    assert step.program is before


def gradient(model, optimizer):
    model[0].weight.grad = torch.ones_like(model[0].weight)


def hook(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change, message", [(gradient, r"shape \[5, 6\] holds a gradient.*zero_grad"), (hook, "hooks")]
)
def test_what_the_update_would_leave_out_is_refused(change, message):
    twin = model()
    optimizer = adamw(twin.parameters())
    step = stepgraph.capture(twin, loss_fn, BATCH, optimizer, passes="exact")
    step(BATCH)
    before = copy.deepcopy(twin.state_dict())
    change(twin, optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        step(BATCH)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), twin.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.3}])
def test_momentum_of_before_a_cast_keeps_its_dtype(dtype, options):
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        twin = model()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, **options)
        step = stepgraph.capture(twin, loss_fn, BATCH, optimizer, passes="exact") if captured else None
        for i in range(4):
            if i == 2:
                twin.to(dtype)
            batch = BATCH.to(twin[0].weight.dtype)
            if step:
                step(batch)
            else:
                loss_fn(twin, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([*twin.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())])
    assert all(map(torch.equal, *ends))


def test_a_count_that_is_no_tensor_is_refused():
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), fused=True)
    step = stepgraph.capture(m, loss_fn, BATCH, optimizer, passes="exact")
    optimizer.state[m[0].weight]["step"] = 3.0
    with pytest.raises(ValueError, match=r"state has step=3.0 for a parameter of shape \[5, 6\]"):
        step(BATCH)


@pytest.mark.parametrize(
    "make", [adamw, lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.SGD(p, 0.1, 0.9)]
)
def test_a_parameter_that_is_resized_under_its_state_is_refused(make):
    """Eager's fused kernels write behind the end of the state that is left."""
    m = model()
    optimizer = make(m.parameters())
    step = stepgraph.capture(m, loss_fn, BATCH, optimizer, passes="exact")
    step(BATCH)
    m[0].weight.data, m[0].bias.data, m[2].weight.data = torch.randn(9, 6), torch.randn(9), torch.randn(6, 9)
    with pytest.raises(ValueError, match=r"has shape \[9, 6\] and its state in .* \[5, 6\]|cannot be traced") as said:
        step(BATCH)
    assert "\n" not in str(said.value)

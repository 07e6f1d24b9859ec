"""The plain eager training loop that captured steps are compared with, bit for bit."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import stepgraph

STEPS = 10


def microbatches(batch: dict[str, torch.Tensor], n: int) -> list[dict[str, torch.Tensor]]:
    """The batch in ``n`` equal parts."""
    return [
        {key: value.chunk(n)[k] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        for k in range(n)
    ]


def eager_step(model, loss_fn, batch, optimizer, max_grad_norm=None, accumulate=1):
    """One plain training step up to, and with, the update; (loss, gradient norm or None)."""
    total = None
    for microbatch in microbatches(batch, accumulate):
        loss = loss_fn(model, microbatch)
        loss = loss / accumulate if accumulate > 1 else loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    norm = None
    if max_grad_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if optimizer is not None:
        for one in listed(optimizer):
            one.step()
            one.zero_grad()
    return total, norm


def listed(several: Any) -> list:
    """One optimizer or schedule, or several of them, as a list."""
    return list(several) if isinstance(several, list | tuple) else [several]


def assert_equal(expected: Any, actual: Any, what: str) -> None:
    """Tensors equal bit for bit, and of one dtype; None only where both are."""
    if expected is None or actual is None:
        assert expected is actual, f"{what}: {type(expected).__name__} against {type(actual).__name__}"
        return
    assert expected.dtype == actual.dtype, what
    assert torch.equal(expected, actual), f"{what} differs by {(expected.double() - actual.double()).abs().max():.3g}"


def assert_same_state(eager: nn.Module, captured: nn.Module, step: int) -> None:
    """Parameters, their gradients, and buffers are equal."""
    for (name, a), b in zip(eager.named_parameters(), captured.parameters(), strict=True):
        assert_equal(a.detach(), b.detach(), f"step {step}: parameter {name}")
        assert_equal(a.grad, b.grad, f"step {step}: gradient of {name}")
        if a.grad is not None:
            assert a.grad.stride() == b.grad.stride(), name
    for (name, a), b in zip(eager.named_buffers(), captured.buffers(), strict=True):
        assert_equal(a, b, f"step {step}: buffer {name}")


def assert_same_optimizer(eager: torch.optim.Optimizer, captured: torch.optim.Optimizer) -> None:
    """The optimizers' state dicts are equal."""
    states = (optimizer.state_dict()["state"] for optimizer in (eager, captured))
    a, b = ({param: kept for param, kept in state.items() if kept} for state in states)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            for one, other in zip(*(pytree.tree_leaves(state[key][name]) for state in (a, b)), strict=True):
                if isinstance(one, torch.Tensor | None):
                    assert_equal(one, other, f"optimizer state {key} {name}")
                else:
                    assert (type(one), one) == (type(other), other), f"optimizer state {key} {name}"
    groups = [optimizer.state_dict()["param_groups"] for optimizer in (eager, captured)]
    assert groups[0] == groups[1]


def check_training(
    model: nn.Module,
    loss_fn: Callable,
    batches: Sequence[dict[str, torch.Tensor]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    passes: Any = "exact",
    make_schedule: Callable | None = None,
    steps: int = STEPS,
) -> stepgraph.CapturedStep:
    """Train two copies of ``model``, one eagerly and one captured, and compare everything; returns the step.

    Without an optimizer, plain SGD outside the step moves the parameters, so that later steps differ from the first.
    """
    runs = []
    for captured in (False, True):
        twin = copy.deepcopy(model)
        optimizer = make_optimizer(twin) if make_optimizer else None
        outside = None if optimizer else torch.optim.SGD(twin.parameters(), lr=0.05)
        schedule = [make_schedule(one) for one in listed(optimizer)] if make_schedule else []
        step = None
        if captured:
            rng = torch.get_rng_state()
            step = stepgraph.capture(
                twin,
                loss_fn,
                batches[0],
                optimizer,
                max_grad_norm=max_grad_norm,
                accumulate=accumulate,
                passes=passes,
            )
            assert torch.equal(rng, torch.get_rng_state()), "capture drew random numbers"
        runs.append((twin, optimizer, outside, schedule, step))
    torch.manual_seed(1)
    rngs = [torch.get_rng_state()] * 2
    for i in range(steps):
        batch = batches[i % len(batches)]
        results = []
        for k, (twin, optimizer, _, schedule, step) in enumerate(runs):
            torch.set_rng_state(rngs[k])
            if step is None:
                results.append(eager_step(twin, loss_fn, batch, optimizer, max_grad_norm, accumulate))
            else:
                results.append((step(batch), step.metrics.get("grad_norm")))
            rngs[k] = torch.get_rng_state()
            for one in schedule:
                with contextlib.suppress(UserWarning):
                    one.step()
        assert_equal(results[0][0], results[1][0], f"step {i}: loss")
        assert_equal(results[0][1], results[1][1], f"step {i}: grad_norm")
        assert torch.equal(*rngs), f"step {i}: state of the random generator"
        assert_same_state(runs[0][0], runs[1][0], i)
        for _, _, outside, _, _ in runs:
            if outside is not None:
                outside.step()
                outside.zero_grad()
    if make_optimizer:
        for a, b in zip(*(listed(optimizer) for _, optimizer, *_ in runs), strict=True):
            assert_same_optimizer(a, b)
    assert torch.isfinite(results[0][0])
    return runs[1][4]


@pytest.fixture(name="check_training")
def check_training_fixture() -> Callable:
    return check_training


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""The learning rate against torch's own schedulers where they have the form, and against closed forms elsewhere."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.optim import lr_scheduler

from stepgraph.config.train import TrainConfig
from stepgraph.train.start import lr_at


def torch_rates(config, after_warmup):
    """The rates of torch's linear warm-up followed by the scheduler that ``after_warmup(optimizer)`` makes."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
    warmup = lr_scheduler.LinearLR(
        optimizer, start_factor=1 / (config.warmup_steps + 1), total_iters=config.warmup_steps
    )
    chain = lr_scheduler.SequentialLR(optimizer, [warmup, after_warmup(optimizer)], milestones=[config.warmup_steps])
    rates = []
    for _ in range(config.steps):
        rates.append(chain.get_last_lr()[0])
        optimizer.step()
        chain.step()
    return rates


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (37, 1), (1000, 333)])
def test_cosine_is_torchs(steps, warmup):
    config = TrainConfig(schedule="cosine", steps=steps, warmup_steps=warmup, lr=3e-3, min_lr_ratio=0.1)
    expected = torch_rates(config, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=steps - warmup, eta_min=3e-4))
    assert [lr_at(step, config) for step in range(steps)] == pytest.approx(expected, rel=1e-9)


def test_constant_is_torchs():
    config = TrainConfig(schedule="constant", steps=40, warmup_steps=7, lr=1e-3)
    expected = torch_rates(config, lambda o: lr_scheduler.ConstantLR(o, factor=1.0))
    assert [lr_at(step, config) for step in range(40)] == pytest.approx(expected, rel=1e-12)


def test_wsd_has_its_three_phases():
    config = TrainConfig(
        schedule="wsd", steps=100, warmup_steps=9, lr=1.0, min_lr_ratio=0.2, decay_fraction=0.25, betas=(0.9, 0.95)
    )
    rates = [lr_at(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[9:76] == [1.0] * 67  # stable up to and with the step that starts the decay
    assert rates[76] == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(1 / 25)))
    assert rates[99] == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(24 / 25)))
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[75:]))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_no_update_is_wasted_and_the_decay_ends_at_the_minimum(schedule):
    config = TrainConfig(schedule=schedule, steps=50, warmup_steps=5, lr=1e-3, min_lr_ratio=0.0)
    rates = [lr_at(step, config) for step in range(50)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    assert max(rates) == rates[5] == 1e-3
    if schedule != "constant":
        assert lr_at(50, config) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warmup_the_first_step_has_the_peak_rate(schedule):
    config = dataclasses.replace(TrainConfig(), schedule=schedule, warmup_steps=0)
    assert lr_at(0, config) == config.lr

"""The loss curve."""

import pytest

from stepgraph.train.records.plot import running_mean


def test_the_running_mean_does_not_lag():
    values = [100.0 - step for step in range(300)]
    assert running_mean(values) == pytest.approx(values)
    noisy = [value + (5 if step % 2 else -5) for step, value in enumerate(values)]
    errors = [abs(mean - value) for mean, value in zip(running_mean(noisy), values, strict=True)]
    assert max(errors[20:-20]) < 1
    assert running_mean([]) == [] and running_mean([3.0]) == [3.0]

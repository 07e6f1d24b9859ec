"""``stepgraph train --mesh ep=2``: a run whose buffers for experts are too small at first, and what it tells of it."""

import json
import re

import pytest

from tests.distributed.test_train import corpus, records, train, train_on  # noqa: F401  (corpus: a fixture)
from tests.train.test_trainer_moe import EXPERTS

RUN = [*EXPERTS, "--batch-size", 1, "--steps", 2, "--expert-capacity", 0.2, "--mesh", "ep=2"]


def loads(folder):
    return [(step, load) for step, load in records(folder, "expert_load")]


def test_repeated_steps_are_in_the_records(corpus, tmp_path):  # noqa: F811
    train_on(2, *RUN, "--data", corpus, "--out", tmp_path / "run")
    ((first, repeated), (_, later)) = records(tmp_path / "run", "repeated_steps")
    assert first == 1 and 1 <= repeated <= later
    assert json.loads((tmp_path / "run/summary.json").read_text())["repeated_steps"] == later
    assert all(len(load) == 1 and 1 <= load[0] <= 8 / 3 for _, load in loads(tmp_path / "run"))


@pytest.mark.long
def test_the_same_run_as_with_larger_buffers(corpus, tmp_path):  # noqa: F811
    """Bit for bit; the terminal says with which option no step would be repeated, and that is so."""
    status, out, err = train(*RUN, "--data", corpus, "--out", tmp_path / "small", "--nproc", 2, cwd=tmp_path)
    assert status == 0, err
    notes = re.findall(
        r"^step (\d+) repeated with larger buffers for experts; --expert-capacity (\S+) has them$", out, re.M
    )
    assert notes[0][0] == "1"
    train_on(2, *RUN, "--data", corpus, "--expert-capacity", notes[-1][1], "--out", tmp_path / "large")
    assert records(tmp_path / "large", "repeated_steps")[-1][1] == 0
    for names in (("loss", "grad_norm"), ("val_loss",)):
        assert records(tmp_path / "small", *names) == records(tmp_path / "large", *names)
    assert loads(tmp_path / "small") == loads(tmp_path / "large")

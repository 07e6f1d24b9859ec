"""A step that runs out of memory: one line with what was asked for, and what would fit."""

import re

import pytest
import torch

from stepgraph.config.device import memory_bytes
from stepgraph.train.trainer import Run
from tests.train.test_trainer_errors import ONE_LAYER, failed, one_line

GPU_SAYS = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
CPU_SAYS = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 21474836480 bytes. Error"


@pytest.mark.parametrize(
    ("failure", "peaks", "options", "advice"),
    [
        (torch.OutOfMemoryError(GPU_SAYS), (2.0, 0.8, 0.5), [], "try --memory selective"),
        (RuntimeError(CPU_SAYS), (2.0, 1.5, 0.5), [], "try --memory full"),
        (torch.OutOfMemoryError(GPU_SAYS), (0.5, 0.4, 0.3), ["--memory", "selective"], "try --memory full"),
        (RuntimeError(CPU_SAYS), (0.2, 0.15, 0.1), [], "the step needs little of that: end what else takes memory"),
        (RuntimeError(CPU_SAYS), (2.0, 1.5, 1.2), [], "no other policy fits: lower --batch-size"),
        (
            torch.OutOfMemoryError(GPU_SAYS),
            (2.0, 1.5, 0.5),
            ["--memory", "full", "--batch-size", 1],
            "no other policy fits: lower --seq-len",
        ),
    ],
    ids=["gpu", "cpu", "selective", "little", "none fits", "full"],
)
def test_out_of_memory_says_what_was_asked_for_and_what_would_fit(
    failure, peaks, options, advice, trainer, tmp_path, monkeypatch, capsys
):
    def fail(self):
        raise failure

    total = memory_bytes(torch.device("cpu"))
    sizes = dict(zip(("none", "selective", "full"), (int(share * total) for share in peaks), strict=True))
    monkeypatch.setattr(Run, "_launch", fail)
    monkeypatch.setattr("stepgraph.train.faults.peak_bytes_by_policy", lambda spec: sizes)
    assert trainer.here(*ONE_LAYER, *options, "--out", tmp_path / "run") == 1
    error = one_line(capsys)
    assert re.match(r"error: out of memory: asked for 20\.00? GiB; the step's estimated peak by --memory, of ", error)
    assert f"selective {sizes['selective'] / 2**30:.1f} GiB" in error and error.endswith(f"; {advice}\n")
    assert failed(trainer, tmp_path / "run")["error"] in error


def test_a_batch_that_does_not_fit_is_one_line(trainer, tmp_path, capsys):
    assert trainer.here(*ONE_LAYER, "--accumulate", 10**13, "--out", tmp_path / "run") == 1
    assert "a batch alone does not fit: lower --accumulate or --batch-size" in one_line(capsys)


def test_out_of_memory_with_the_true_estimate(trainer, tmp_path, monkeypatch, capsys):
    def fail(self):
        raise torch.OutOfMemoryError(GPU_SAYS)

    monkeypatch.setattr(Run, "_launch", fail)
    assert trainer.here("--out", tmp_path / "run") == 1
    said = one_line(capsys)  # this tiny model is not what fills the memory
    assert "the step needs little of that" in said and "try --memory" not in said

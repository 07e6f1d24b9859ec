"""Ranks on GPUs that are stopped or killed while NCCL, or a copy engine, waits for them."""

import os
import signal
import time

import pytest
import torch

from tests.distributed import faulty
from tests.distributed.test_faults import Job
from tests.distributed.test_first_step_faults import (
    hangs_in_the_first_step,
    raises,
    stopped_in_the_first_step,
    words_of,
)
from tests.distributed.test_train import TINY_RUN, corpus  # noqa: F401

WORDS = [{"cpu": "cuda"}.get(word, word) for word in TINY_RUN]


@pytest.mark.parametrize(
    "options", [["--no-cuda-graph"], [], ["--copy-engines"]], ids=["nccl", "graph", "copy_engines"]
)
def test_a_hung_and_a_killed_rank_end_the_ranks_and_are_named(corpus, tmp_path, options):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    words = [*WORDS, "--data", corpus, "--mesh", "fsdp=2", "--nproc", 2, "--max-restarts", 1, "--comm-timeout", 10]
    words += ["--steps", 1000000, "--checkpoint-every", 0, "--val-every", 0, "--inductor", "off", *options]
    with Job([], tmp_path, *words, "--out", tmp_path / "run") as job:
        job.wait_for(job.out, "\nstep 20/")
        stopped = job.kill(1, signal.SIGSTOP)
        job.wait_for(job.err, "made no progress")
        os.kill(stopped, signal.SIGKILL)
        (line,) = [text for text in job.err.read_text().splitlines() if "made no progress" in text]
        assert line.startswith("error: rank 0 (") and "--comm-timeout 10" in line and f"pid {stopped}) was in" in line
        if options == ["--no-cuda-graph"] and "): step " in line:  # launched one by one, and not the vote between two
            node = line.partition("it waits in ")[2].partition(" ")[0]
            assert any(text.startswith(f"{node}: ") for text in (tmp_path / "run/graph.txt").read_text().splitlines())

        job.wait_for(job.out, "restarted after step 0")
        job.wait_for(job.out, "\nstep 20/", times=2)
        killed, start = job.kill(1, signal.SIGKILL), time.monotonic()
        assert job.process.wait(60) == 1 and time.monotonic() - start < 60
    *_, last = job.err.read_text().splitlines()
    assert last.startswith(f"error: rank 1 (pid {killed}) was killed by SIGKILL"), job.err.read_text()


@pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2"])
def test_a_first_step_that_hangs(mesh, corpus, tmp_path, monkeypatch):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    faulty.of_rank_1(monkeypatch, tmp_path, "step", "hangs")
    hangs_in_the_first_step(words_of(mesh, corpus, tmp_path, "cuda"), tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2"])
def test_a_rank_that_is_stopped_in_the_first_step(mesh, corpus, tmp_path):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    stopped_in_the_first_step([*words_of(mesh, corpus, tmp_path, "cuda"), "--steps", 1000000], tmp_path)


@pytest.mark.parametrize("place", ["capture", "step", "save"])
def test_a_rank_that_raises(place, corpus, tmp_path, monkeypatch):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    faulty.of_rank_1(monkeypatch, tmp_path, place, "raises")
    raises(words_of("fsdp=2", corpus, tmp_path, "cuda"), tmp_path)

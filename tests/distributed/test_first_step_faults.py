"""A rank that hangs in the first step, or raises in a capture, a step or a save: every rank ends, and says why."""

import contextlib
import os
import re
import signal

import pytest

from tests.distributed import faulty
from tests.distributed.test_faults import PATIENCE_S, Job, linux
from tests.distributed.test_train import TINY_RUN, corpus  # noqa: F401

LIMIT_S = 6


def words_of(mesh, corpus, folder, device="cpu"):  # noqa: F811
    """A run over two ranks that is in its first step for long."""
    words = [{"cpu": device}.get(word, word) for word in TINY_RUN]
    words += ["--data", corpus, "--mesh", mesh, "--nproc", 2, "--val-every", 0, "--out", folder / "run"]
    words += ["--first-step-timeout", LIMIT_S, "--checkpoint-every", 2, "--steps", 4, "--inductor", "off"]
    if mesh == "pp=2":
        words += ["--batch-size", 1, "--model.n-layers", 2, "--accumulate", 4]
    return words


def hangs_in_the_first_step(words, folder):
    """The one line of rank 0, and every rank ends."""
    with Job([], folder, *words) as job:
        job.wait_for(job.err, "made no progress")
        assert job.process.wait(PATIENCE_S) == 1
    lines = [line for line in job.err.read_text().splitlines() if "made no progress" in line]
    for line in lines:
        assert line.startswith("error: rank ") and f"(--first-step-timeout {LIMIT_S})" in line
        assert re.search(r"step 1 made no progress for \d+ s, nor did any other rank", line)
    assert "Traceback" not in job.err.read_text() and "does not answer" not in job.err.read_text()
    return "\n".join(lines)


def raises(words, folder):
    """What the ranks say; every rank ends."""
    with Job([], folder, *words) as job:
        assert job.process.wait(PATIENCE_S) == 1
    said = job.err.read_text()
    assert "a planted fault" in said and said.splitlines()[-1].startswith("error: rank 1 (pid "), said
    return said


def stopped_in_the_first_step(words, folder):
    """What rank 0 says of rank 1, which SIGSTOP stops when its first step begins; every rank ends."""
    with Job([], folder, *words) as job:
        job.wait_for(job.out, "ready in")
        stopped = job.kill(1, signal.SIGSTOP)
        job.wait_for(job.err, "made no progress")
        with contextlib.suppress(ProcessLookupError):  # else the launcher waits half a minute for it
            os.kill(stopped, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == 1
    (line,) = [line for line in job.err.read_text().splitlines() if "made no progress" in line]
    assert line.startswith("error: rank 0 (") and re.search(rf"rank 1 \(.*, pid {stopped}\) was in .* \d+ s ago", line)
    return line


@linux
@pytest.mark.slow
@pytest.mark.long  # tests/bench/train has a rank that hangs in its first step
@pytest.mark.parametrize("mesh", ["pp=2", "fsdp=2"])
def test_a_rank_that_hangs_in_the_first_step(mesh, corpus, tmp_path, monkeypatch):  # noqa: F811
    faulty.of_rank_1(monkeypatch, tmp_path, "step", "hangs")
    said = hangs_in_the_first_step(words_of(mesh, corpus, tmp_path), tmp_path)
    if "error: rank 0 " in said and mesh == "pp=2":
        assert re.search(r"it waits for stage 1 on rank 1 in (backward|receive_backward)\.0 of microbatch 0", said)


@linux
@pytest.mark.long
def test_a_rank_that_is_stopped_in_the_first_step(corpus, tmp_path):  # noqa: F811
    words = [*words_of("pp=2", corpus, tmp_path), "--accumulate", 384, "--passes", "exact"]
    assert "it waits for stage 1 on rank 1 in " in stopped_in_the_first_step(words, tmp_path)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["step", pytest.param("capture", marks=pytest.mark.long), pytest.param("save", marks=pytest.mark.long)]
)
def test_a_rank_that_raises(place, corpus, tmp_path, monkeypatch):  # noqa: F811
    faulty.of_rank_1(monkeypatch, tmp_path, place, "raises")
    raises([*words_of("fsdp=2", corpus, tmp_path), "--first-step-timeout", PATIENCE_S], tmp_path)

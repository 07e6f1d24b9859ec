"""A stage of a pipeline that is killed or hangs: the run ends, and says in which microbatch's call."""

import contextlib
import os
import re
import signal
import time

import pytest

from tests.distributed.test_faults import PATIENCE_S, Job, linux
from tests.distributed.test_train import TINY_RUN, corpus  # noqa: F401

CALL = r"step \d+, (forward|backward|receive_forward|receive_backward)\.{} of microbatch \d+"
TOLD_S = 6.0  # ranks tell every half second where they are


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_killed_and_a_hung_stage_are_named_with_their_microbatch(corpus, tmp_path, number):  # noqa: F811
    words = [*TINY_RUN, "--data", corpus, "--mesh", "pp=2", "--batch-size", 1, "--model.n-layers", 2, "--nproc", 2]
    words += ["--steps", 100000, "--checkpoint-every", 0, "--val-every", 0, "--accumulate", 384, "--passes", "exact"]
    with Job([], tmp_path, *words, "--comm-timeout", 16, "--out", tmp_path / "run") as job:
        job.wait_for(job.out, "\nstep 2/")
        # The first stage stops amid its microbatches and the last one waits for it: every rank tells where it is.
        time.sleep(0.3)  # of 1.2 s and more that a step takes
        first = job.kill(0, signal.SIGSTOP)
        time.sleep(TOLD_S)
        last = job.kill(1, number)
        os.kill(first, signal.SIGCONT)
        if number == signal.SIGSTOP:
            until = time.monotonic() + PATIENCE_S
            while "--comm-timeout 16" not in job.err.read_text():
                assert time.monotonic() < until
                time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):  # for the launcher, which may give it half a minute to stop
                os.kill(last, signal.SIGKILL)
        assert job.process.wait(PATIENCE_S) == 1
    lines = job.err.read_text().splitlines()
    assert "Traceback" not in job.err.read_text()
    if number == signal.SIGKILL:
        what = rf"error: rank 1 \(pid {last}\) was killed by SIGKILL, \d+ s after it was in {CALL.format(1)}"
        assert re.search(what, lines[-1]), lines
        assert any("rank 0 (" in line and " lost another rank (" in line for line in lines)
    else:
        # Which of the two is noticed first depends on the machine: rank 0 stands still, rank 1 tells nothing.
        (line,) = [line for line in lines if "made no progress" in line or "silent for" in line]
        assert line.startswith("error: rank 0 (") and "--comm-timeout 16" in line, line
        assert re.search(r"it waits for stage 1 on rank 1 in backward\.0 of microbatch \d+\b", line), line
        assert re.search(rf"rank 1 \(.*, pid {last}\) was in {CALL.format(1)} \d+ s ago", line), line

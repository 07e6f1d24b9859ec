"""Lines for a person who waits."""

import logging
import time

from stepgraph.passes.waiting import Waiting


def test_what_runs_is_said_again_and_again_and_the_logs_are_as_before():
    said, log = [], logging.getLogger("stepgraph.compile")
    before = log.level, list(log.handlers)
    with Waiting(said.append, every_s=0.1):
        time.sleep(0.25)
        log.info("compiling piece %d of %d, %s", 3, 11, "forward_2")
        time.sleep(0.25)
    assert said[0] == "tracing the step (0 s)" and said[-1] == "compiling piece 3 of 11, forward_2 (0 s)"
    assert (log.level, log.handlers) == before
    count = len(said)
    time.sleep(0.15)
    assert len(said) == count


def test_short_work_is_silent():
    said = []
    with Waiting(said.append):
        pass
    assert said == []

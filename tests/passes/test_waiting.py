"""Lines for a person who waits."""

import logging
import time

import pytest

from stepgraph.passes import waiting
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


def test_the_users_logging_decides_who_gets_a_line(monkeypatch, capsys):
    """Nothing set up: stderr. Else the logger ``stepgraph``, at INFO; what the lines come from stays silent."""
    log, piece, shown = logging.getLogger("stepgraph.of_this_test"), logging.getLogger("stepgraph.compile"), []
    monkeypatch.setattr(waiting, "log", log)
    monkeypatch.setattr(log, "propagate", False)  # pytest sets logging up
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())

    def wait():
        with Waiting(what="tracing", every_s=0.05):
            piece.info("compiling piece 1 of 2")
            time.sleep(0.08)
        return capsys.readouterr().err

    assert wait() == "stepgraph: compiling piece 1 of 2 (0 s)\n"
    log.setLevel(logging.WARNING)
    assert wait() == ""
    log.addHandler(handler)
    logging.getLogger().addHandler(handler)
    try:
        assert wait() == "" and shown == []
        log.setLevel(logging.INFO)
        assert wait() == "" and shown == ["compiling piece 1 of 2 (0 s)"]
    finally:
        logging.getLogger().removeHandler(handler)


def test_inside_another_one_it_does_nothing():
    outer, inner = [], []
    with Waiting(outer.append, every_s=0.05), Waiting(inner.append, every_s=0.05):
        time.sleep(0.08)
    assert outer and not inner
    with Waiting(inner.append, every_s=0.05), pytest.raises(ValueError):
        time.sleep(0.08)
        raise ValueError
    assert inner

"""Lines for a person who waits."""

import logging
import queue
import threading
from types import SimpleNamespace

import pytest

from stepgraph.passes import waiting


class Waiting(waiting.Waiting):
    """Its seconds pass when `tick` is called, which comes back when the line is said."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._done, self.ticks, self.asked = self, queue.Queue(), []

    def wait(self, seconds):
        if self.asked:
            self.ticks.task_done()
        self.asked.append(seconds)
        return self.ticks.get()

    def set(self):
        self.ticks.put(True)

    def tick(self):
        self.ticks.put(False)
        self.ticks.join()


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch):
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_what_runs_is_said_again_and_again_and_the_logs_are_as_before():
    said, log = [], logging.getLogger("stepgraph.compile")
    before = log.level, list(log.handlers)
    with Waiting(said.append) as waits:
        waits.tick()
        waits.tick()
        log.info("compiling piece %d of %d, %s", 3, 11, "forward_2")
        waits.tick()
    assert said == ["tracing the step (0 s)"] * 2 + ["compiling piece 3 of 11, forward_2 (0 s)"]
    assert (log.level, log.handlers) == before and set(waits.asked) == {waiting.EVERY_S}
    assert not any(thread.name == "waiting" for thread in threading.enumerate())


def test_what_stops_a_run_is_said_sooner_and_with_its_reason():
    said = []
    with Waiting(said.append, why="a batch of a different form: ", first_s=1.0) as waits:
        waits.tick()
        waits.tick()
    assert said == ["a batch of a different form: tracing the step (0 s)"] * 2
    assert waits.asked == [1.0, waiting.EVERY_S, waiting.EVERY_S]


def test_short_work_is_silent():
    said = []
    with waiting.Waiting(said.append):
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
        with Waiting(what="tracing") as waits:
            piece.info("compiling piece 1 of 2")
            waits.tick()
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
    with Waiting(outer.append) as waits, Waiting(inner.append) as nothing:
        waits.tick()
    assert outer and not inner and not nothing.asked
    with Waiting(inner.append) as waits, pytest.raises(ValueError):
        waits.tick()
        raise ValueError
    assert inner

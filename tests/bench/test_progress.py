"""What a provider's process says of itself while it is waited for."""

import logging
import time
import types

import pytest

from stepgraph import passes
from stepgraph.bench import progress
from stepgraph.passes import runner


@pytest.fixture
def row():
    return types.SimpleNamespace(model="m", provider="p", phases_s=None)


def test_phases_are_printed_once_with_their_seconds(row, tmp_path, monkeypatch, capsys):
    with progress.Progress(row, tmp_path / "phases") as watched:
        monkeypatch.setenv(progress.VARIABLE, watched.environment[progress.VARIABLE])
        for name in ("build", "timing", progress.WAITING, "timing"):
            progress.phase(name)
        monkeypatch.setenv("RANK", "1")  # only the first rank reports
        progress.phase("capture")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["m | p | start", "m | p | build", "m | p | timing"]
    assert list(row.phases_s) == ["start", "build", "timing"] and "start took" in lines[1]


def test_a_long_phase_is_not_silent(row, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SPEAKS_EVERY_S", 0.1)
    monkeypatch.setattr(progress, "_POLL_S", 0.02)
    said = ""
    with progress.Progress(row, tmp_path / "phases") as watched:
        while said.count("m | p | start, ") < 2:
            said += capsys.readouterr().err
            time.sleep(0.01)
        assert str(watched).startswith("start, ")
        monkeypatch.setenv(progress.VARIABLE, watched.environment[progress.VARIABLE])
        progress.phase("compile", "compiling piece 2 of 3")
        while "m | p | compile (compiling piece 2 of 3), " not in said:
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert row.phases_s["start"] > 0.1


def test_the_compiler_is_a_phase_of_a_capture(tmp_path, monkeypatch):
    found = []
    pieces = logging.getLogger("stepgraph.compile")
    monkeypatch.setattr(progress, "phase", lambda *words: found.append(words))
    for log in (runner.log, pieces):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(log, name, [] if name == "handlers" else getattr(log, name))
    progress.phases_of_passes()
    for name in ("bucket_collectives", "inductor", "cuda_graph"):
        assert name in passes.order.ORDER
        runner.log.info("pass %s", name)
    pieces.info("compiling piece %d of %d", 1, 3)
    assert [phase for phase, _ in found] == ["capture", "compile", "capture", "compile"]
    assert found[1][1] == "pass inductor" and found[3][1] == "compiling piece 1 of 3"

"""Ctrl-C at any stage of a command: answered at once, by one line, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepgraph.bench.lane import Lane
from stepgraph.bench.rows import Row
from stepgraph.passes.compile import inductor
from stepgraph.run.watch.signals import StopSignals

#: Seconds that an answer may take on a busy machine, of 0.1 to 0.8: far fewer than what is interrupted takes.
SOON_S = 60


def below(pid: int) -> list[int]:
    """The process and all that it started, from /proc."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += below(int(child))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("command", ["train", "train on two ranks", "compile", "bench"])
@pytest.mark.parametrize("stage", ["imports", "compilation"])
def test_ctrl_c_is_answered_at_once(command, stage, trainer, tmp_path):
    """The compiler takes 1000 s, and the signal reaches the first process alone."""
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexec sleep 1000\n")
    compiler.chmod(0o755)
    run = [*trainer.arguments("--inductor", "full", "--saved-steps", "off", "--out", tmp_path / "run")]
    words = {
        "train": run,
        "train on two ranks": [*run, "--mesh", "fsdp=2", "--nproc", "2"],
        "compile": ["compile", "--inductor", "full", "--device", "cpu", "--out", str(tmp_path / "steps")],
        "bench": ["bench", "step", "--providers", "stepgraph", "--device", "cpu"],
    }[command]
    environment = os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "stepgraph", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True, preexec_fn=ctrl_c_arrives,
    )  # fmt: skip
    if stage == "imports":
        time.sleep(0.5)
    else:
        until = time.monotonic() + 240
        while not (tmp_path / "called").exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.05)
    family, began = below(process.pid), time.monotonic()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=2 * SOON_S)
    assert time.monotonic() - began < SOON_S
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    until = time.monotonic() + SOON_S
    while any(alive(pid) for pid in family):  # a compiler may end after its process
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in family if alive(pid)]
        assert time.monotonic() < until or all("sleep" in name for name in names), names
        if time.monotonic() > until:
            break
        time.sleep(0.05)


def ctrl_c_arrives() -> None:
    """A shell's background jobs start with the signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_during_an_import_that_swallows_it_ends_the_command(tmp_path):
    swallows = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "torch.py").write_text(swallows)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-c", "from stepgraph.cli import _load_torch; _load_torch(); print('went on')"]
    found = subprocess.run(words, capture_output=True, text=True, env=environment, preexec_fn=ctrl_c_arrives)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_inductor_compiles_ends_what_works_for_it(monkeypatch):
    ended = []

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(inductor, "compile_pieces", interrupted)
    monkeypatch.setattr(inductor.compat, "end_compile_workers", lambda: ended.append("workers"))
    monkeypatch.setattr(inductor.Ahead, "end", lambda self: ended.append("ahead"))
    import torch

    import stepgraph

    with pytest.raises(KeyboardInterrupt):
        stepgraph.capture(torch.nn.Linear(2, 2), lambda m, x: m(x).sum(), torch.ones(2, 2), passes=["inductor"])
    assert ended == ["ahead", "workers"]


def test_the_first_signal_is_answered_by_a_line(capfd):
    with StopSignals(speaks=True) as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == "SIGTERM"
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
    (line,) = capfd.readouterr().err.split("\n")[1:-1]
    assert line.startswith("SIGTERM: the run ") and "second Ctrl-C" in line


def test_ranks_take_the_first_ctrl_c_while_they_capture_and_ignore_later_ones(capfd):
    with StopSignals(patient=True, speaks=True) as signals:
        with pytest.raises(KeyboardInterrupt), signals.ctrl_c_at_once():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)  # the terminal's, and the launcher's
        assert signals.received is None
        signal.raise_signal(signal.SIGINT)
        assert signals.received == "SIGINT"
    assert capfd.readouterr().err == ""
    with StopSignals(patient=True, speaks=True):
        signal.raise_signal(signal.SIGINT)
    said = capfd.readouterr().err
    assert "SIGINT: the run " in said and "second" not in said  # ranks take no second one


def test_a_provider_is_not_waited_for_after_ctrl_c():
    began = time.monotonic()
    code = "import sys, time; print('{}', flush=True); time.sleep(1000)"
    with pytest.raises(KeyboardInterrupt), Lane(Row(model="m", provider="p"), [sys.executable, "-c", code]) as lane:
        lane.receive()
        raise KeyboardInterrupt
    assert time.monotonic() - began < SOON_S and lane.process is None

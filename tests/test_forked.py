"""The ``python`` that forks does what a real one does."""

import os
import signal
import subprocess
from pathlib import Path

from tests.forked import environment, python

ROOT = Path(__file__).parents[1]

PROGRAM = """
import atexit, os, sys, stepgraph
atexit.register(print, "at exit")
print(sys.argv[1:], os.getcwd(), os.environ["STEPGRAPH_WORD"], sys.stdin.read(), __name__, "torch" in sys.modules)
print("error", file=sys.stderr)
exec(sys.argv[1])
"""


def test_streams_status_and_signals(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "of another test")
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(code, **more):
        command = [python(), "-u", "program.py", code]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment() | {"STEPGRAPH_WORD": "word"} | more,
            input="in",
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = run("raise SystemExit(3)")
    assert done.stdout == f"['raise SystemExit(3)'] {tmp_path} word in __main__ True\nat exit\n", done.stderr
    assert (done.returncode, done.stderr) == (3, "error\n")
    assert run("").returncode == 0
    failed = run("1 / 0")
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run("os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    other = run("", TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))  # a real python, which has not imported torch yet
    assert other.stdout == f"[''] {tmp_path} word in __main__ False\nat exit\n", other.stderr


def test_a_signal_reaches_the_program_and_it_ends_with_its_client(tmp_path):
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(1e6)")
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [python(), str(tmp_path / "program.py")]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            end = os.pidfd_open(int(process.stdout.readline()))
            process.send_signal(number)
            assert process.wait(300) == -number
            assert process.stdout.read() == ""
            os.close(end)

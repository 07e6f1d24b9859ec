"""What a provider is doing: its process reports phases, and the process that started it prints them with their seconds.

The phases: ``start`` (of the process, and its imports), ``build``, ``capture``, ``compile``, ``warm up``, ``timing``,
``profile``. Between requests a process reports `WAITING`.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

from stepgraph.bench.rows import ProviderRow

#: The environment's name for the file of a provider's phases, a line each: ``[name, seconds since the epoch]``.
VARIABLE = "STEPGRAPH_BENCH_PHASES"

#: Who says which pass runs, and which piece is compiled.
PASSES, PIECES = "stepgraph.passes", "stepgraph.compile"

#: The phase of a process that has nothing to do until the next request.
WAITING = ""

#: A phase that lasts longer is printed again, with the seconds so far.
SPEAKS_EVERY_S = 5.0

_POLL_S = 0.25


def phase(name: str, part: str = "") -> None:
    """In a provider's process, on rank 0: from now on it is in the phase ``name``, and in that in ``part``."""
    if VARIABLE in os.environ and os.environ.get("RANK", "0") == "0":
        with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
            file.write(json.dumps([name, time.time(), part]) + "\n")


class _Passes(logging.Handler):
    """Takes the passes of a capture for phases."""

    def emit(self, record: logging.LogRecord) -> None:
        compiles = record.name == PIECES or record.args == ("inductor",)
        phase("compile" if compiles else "capture", record.getMessage())


def phases_of_passes() -> None:
    """In a provider's process: a capture reports when it compiles."""
    for log in map(logging.getLogger, (PASSES, PIECES)):
        log.setLevel(logging.INFO)
        log.addHandler(_Passes())
        log.propagate = False


def note(row: ProviderRow, text: str) -> None:
    """Print how far the provider of ``row`` is; on stderr, so that stdout holds the result alone."""
    print(f"{row.model} | {row.provider} | {text}", file=sys.stderr, flush=True)


class Progress:
    """A context manager in the process that starts a provider's: prints each new phase, and every 10 s how long it has
    lasted, and keeps the seconds of each in ``row.phases_s``.

    ``path``: the file that `phase` writes, which ``environment`` names.
    """

    def __init__(self, row: ProviderRow, path: Path):
        self.row, self.path = row, path
        self.environment = {VARIABLE: str(path)}
        self._read = 0

    def __enter__(self) -> "Progress":
        self._done = threading.Event()
        self._name, self._part, self._since = "start", "", time.time()
        self._spoke = self._since
        self.row.phases_s = {"start": 0.0}
        note(self.row, "start")
        self._thread = threading.Thread(target=self._watch, name=f"progress of {self.row.provider}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()
        self._leave(time.time())

    def __str__(self) -> str:
        """The phase, and how long it has lasted."""
        part = f" ({self._part})" if self._part else ""
        return f"{self._name or 'waiting'}{part}, {time.time() - self._since:.0f} s"

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            self._look()
            if self._name != WAITING and time.time() - max(self._spoke, self._since) >= SPEAKS_EVERY_S:
                self._say(str(self))

    def _look(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] if self.path.exists() else []
        for line in lines[self._read :]:
            name, at, self._part = json.loads(line)
            if name == self._name:
                continue
            left = self._leave(at)
            self._name, self._since = name, at
            if name != WAITING and name not in self.row.phases_s:
                self.row.phases_s[name] = 0.0
                self._say(f"{name}{left}")
        self._read = len(lines)

    def _leave(self, at: float) -> str:
        if self._name == WAITING:
            return ""
        seconds = self.row.phases_s[self._name] = self.row.phases_s[self._name] + at - self._since
        return f" ({self._name} took {seconds:.1f} s)"

    def _say(self, text: str) -> None:
        self._spoke = time.time()
        note(self.row, text)

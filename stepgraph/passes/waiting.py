"""Progress lines while a step is traced, rewritten and compiled."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

#: Who says what begins: each pass, and each piece that Inductor compiles.
_LOGS = ("stepgraph.passes", "stepgraph.compile")

#: Seconds without a line after which one is due.
EVERY_S = 5.0

#: The logger of everything that stepgraph reports.
log = logging.getLogger("stepgraph")


def tell(line: str) -> None:
    """Report ``line`` to whoever calls stepgraph from Python: as INFO of the logger ``stepgraph`` where logging is set
    up, else on stderr, by rank 0."""
    if log.hasHandlers():
        log.info(line)
    elif os.environ.get("RANK", "0") == "0" and sys.stderr is not None and log.level <= logging.INFO:
        print(f"stepgraph: {line}", file=sys.stderr, flush=True)


class Waiting(logging.Handler):
    """A context manager: ``say`` gets a line, such as ``compiling piece 3 of 11 (12 s)``, whenever `EVERY_S` seconds
    have passed without one. ``what``: the work that comes before the first pass. ``why``: what all lines begin with.
    ``first_s``: seconds until the first one, if fewer. Inside another one it does nothing.
    """

    _active = False

    def __init__(
        self,
        say: Callable[[str], object] = tell,
        what: str = "tracing the step",
        why: str = "",
        first_s: float | None = None,
    ):
        super().__init__()
        self._say, self._what, self._why, self._first_s = say, what, why, first_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Waiting":
        if Waiting._active:
            return self
        Waiting._active = True
        self._since = time.monotonic()
        self._before = [(one, one.level, one.propagate) for one in map(logging.getLogger, _LOGS)]
        for one, _, propagate in self._before:
            one.propagate = propagate and one.isEnabledFor(logging.INFO)  # else the user's handlers would show it
            one.setLevel(logging.INFO)
            one.addHandler(self)
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        Waiting._active = False
        for one, level, propagate in self._before:
            one.removeHandler(self)
            one.setLevel(level)
            one.propagate = propagate

    def emit(self, record: logging.LogRecord) -> None:
        self._what, self._since = record.getMessage(), time.monotonic()

    def _watch(self) -> None:
        due = EVERY_S if self._first_s is None else self._first_s
        while not self._done.wait(due):
            self._say(f"{self._why}{self._what} ({time.monotonic() - self._since:.0f} s)")
            due = EVERY_S

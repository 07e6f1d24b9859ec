"""Lines for a person who waits while a step is traced, rewritten and compiled."""

import logging
import threading
import time
from collections.abc import Callable

#: Who says what begins: each pass, and each piece that Inductor compiles.
_LOGS = ("stepgraph.passes", "stepgraph.compile")


class Waiting(logging.Handler):
    """A context manager: ``say`` gets a line, such as ``compiling piece 3 of 11 (12 s)``, whenever ``every_s`` seconds
    have passed without one. ``what``: the work that comes before the first pass."""

    def __init__(self, say: Callable[[str], object], what: str = "tracing the step", every_s: float = 5.0):
        super().__init__()
        self._say, self._what, self._every_s = say, what, every_s
        self._done = threading.Event()

    def __enter__(self) -> "Waiting":
        self._since = time.monotonic()
        self._before = [(log, log.level) for log in map(logging.getLogger, _LOGS)]
        for log, _ in self._before:
            log.setLevel(logging.INFO)
            log.addHandler(self)
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for log, level in self._before:
            log.removeHandler(self)
            log.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self._what, self._since = record.getMessage(), time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self._say(f"{self._what} ({time.monotonic() - self._since:.0f} s)")

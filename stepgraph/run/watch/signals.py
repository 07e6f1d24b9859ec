"""Ctrl-C, SIGTERM and SIGHUP as requests to stop, honoured when the run's state is consistent."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: A second of these ends the process at once.
_URGENT = (signal.SIGINT, signal.SIGTERM)


def stopping() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop. Under ``nohup`` a closed terminal is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return _URGENT if ignored else (*_URGENT, signal.SIGHUP)


class StopSignals:
    """A context manager that records SIGINT, SIGTERM and SIGHUP: ``received`` is the signal's name, or None.

    The first signal, or leaving the context, restores the handlers of SIGINT and SIGTERM, so that a second one ends the
    process at once; a terminal that goes away may send SIGHUP twice. ``patient``: later signals are only recorded too,
    for ranks that get Ctrl-C from the terminal and again from torchrun. ``speaks``: the first signal is answered by a
    line on stderr.
    """

    def __init__(self, *, patient: bool = False, speaks: bool = False) -> None:
        self.received: str | None = None
        self._patient, self._speaks = patient, speaks
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in stopping():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(*self._before)

    @contextlib.contextmanager
    def ctrl_c_at_once(self) -> Iterator[None]:
        """Inside, the first Ctrl-C raises ``KeyboardInterrupt`` at once: there is no new state to save."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._speaks = False  # an agent that ends the other ranks sends SIGTERM
        if self._patient:
            signal.signal(number, signal.SIG_IGN)  # the same Ctrl-C may come again while the ranks end
        signal.default_int_handler(number, frame)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, self._before[number])

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._speaks and self.received is None:
            again = "" if self._patient else "; a second Ctrl-C ends it at once, without the checkpoint"
            text = f"\n{signal.Signals(number).name}: the run finishes its work, saves and ends{again}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())  # the signal may have come while Python's own stream was written to
        self.received = signal.Signals(number).name
        if not self._patient:
            self._restore(*_URGENT)

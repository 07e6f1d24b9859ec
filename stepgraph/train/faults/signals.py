"""Ctrl-C and SIGTERM as requests to stop, which the run meets where its state is consistent."""

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """A context manager that records SIGINT and SIGTERM instead of letting them end the process.

    ``received``: the name of the signal, or None. The first signal, or leaving the context, restores both handlers, so
    that a second signal ends the process at once. ``patient``: later signals are only recorded too, for ranks that get
    Ctrl-C from the terminal and again from torchrun.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.received: str | None = None
        self._patient = patient
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if not self._patient:
            self.__exit__()

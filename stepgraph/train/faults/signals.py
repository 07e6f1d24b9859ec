"""Ctrl-C and SIGTERM as a request: the run stops where its state is whole."""

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """A context manager that takes note of SIGINT and SIGTERM instead of dying of them.

    ``received``: the name of the signal, or None. After the first one both have their former handlers again, so that
    a second one ends the process at once; leaving the context gives them back too. ``patient``: later ones are noted
    like the first, for ranks that get Ctrl-C from the terminal and again from torchrun.
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

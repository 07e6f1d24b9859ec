"""Errors that leave a run's weights as they are: data that cannot be read, records or output that cannot be written.

The run stops as for a signal, on all ranks after the same step, saves, and ends with the error.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

OUTPUT = "the output cannot be written"


class StoppedError(RuntimeError):
    """The run was saved, and ends for an error that has nothing to do with its weights."""


class SoundFailures:
    """``first``: the first such error, in one line, or None."""

    def __init__(self) -> None:
        self.first: str | None = None

    @contextlib.contextmanager
    def noted(self, *kinds: type[Exception], what: str = "the records cannot be written") -> Iterator[None]:
        """Keep an OSError, or one of ``kinds``, that is raised inside, and go on behind the block. ``what``: said of an
        error of the system that names no file."""
        try:
            yield
        except BrokenPipeError:
            silence()
            self.first = self.first or "the reader of this output is gone"
        except (OSError, *kinds) as failure:
            text = " ".join(str(failure).split())
            nameless = isinstance(failure, OSError) and failure.errno is not None and failure.filename is None
            self.first = self.first or (f"{what} ({text})" if nameless else text)

    @contextlib.contextmanager
    def of_threads(self) -> Iterator[None]:
        """Keep the OSErrors that end threads inside, such as TensorBoard's writer."""
        before = threading.excepthook

        def note(ended: threading.ExceptHookArgs) -> None:
            if not isinstance(ended.exc_value, OSError):
                return before(ended)
            with self.noted():
                raise ended.exc_value

        threading.excepthook = note
        try:
            yield
        finally:
            threading.excepthook = before

    def say(self, *text: object) -> None:
        """Print, at once: a pipe shows each line when it is said, and keeps it when the run is killed."""
        with self.noted(what=OUTPUT):
            print(*text, flush=True)


def silence() -> None:
    """From now on what is printed goes nowhere, if nobody reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)

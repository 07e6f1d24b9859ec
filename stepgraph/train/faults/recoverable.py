"""Errors that leave a run's weights as they are, such as records that cannot be written: the run stops as for a signal,
on all ranks after the same step, saves, and ends with the error."""

import contextlib
import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

OUTPUT = "the output cannot be written"
_NOBODY_READS = "the reader of this output is gone"


class StoppedError(RuntimeError):
    """The run was saved, and ends for an error that has nothing to do with its weights."""


class RecoverableErrors:
    """``first``: the first such error, in one line, or None."""

    def __init__(self) -> None:
        self.first: str | None = None

    @contextlib.contextmanager
    def noted(self, *kinds: type[Exception], what: str = "the records cannot be written") -> Iterator[None]:
        """Keep an OSError, or one of ``kinds``, that is raised inside, and continue after the block. ``what``: the
        words for an error of the system that names no file."""
        try:
            yield
        except BrokenPipeError:
            silence()
            self.first = self.first or _NOBODY_READS
        except (OSError, *kinds) as failure:
            if isinstance(failure, OSError) and failure.errno == errno.EIO and silence():  # a terminal hung up
                self.first = self.first or _NOBODY_READS
                return
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


def silence() -> bool:
    """From now on what is printed goes nowhere, if nobody reads it any more; whether that is so."""
    streams = [getattr(stream, "rich_proxied_file", stream) for stream in (sys.stdout, sys.stderr)]  # of a live line
    gone = [stream for stream in streams if _is_gone(stream)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return bool(gone)


def _is_gone(stream: TextIO) -> bool:
    """Whether it is a pipe that nobody reads, or was a terminal."""
    try:
        stream.flush()
        found = os.fstat(stream.fileno())
        device = stat.S_ISCHR(found.st_mode) and found.st_rdev != os.stat(os.devnull).st_rdev
        return device and not stream.isatty()
    except OSError as failure:  # tests' streams have no number
        return failure.errno in (errno.EPIPE, errno.EIO)

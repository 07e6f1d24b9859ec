"""Error messages for people: what was given, what is allowed, one fix."""

import contextlib
import difflib
import json
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

#: The exit status of a command that Ctrl-C ends where there is nothing to save.
INTERRUPTED = 130
#: Seconds after which a process that is to end no longer waits for the reader of its output.
_LAST_WORDS_S = 5.0


def end_process(status: int, message: str = "") -> NoReturn:
    """Write ``message`` to stderr, flush both streams and end this process with ``status``, without Python's cleanup. A
    stream cannot keep it alive: a closed pipe raises, a full one blocks, and one in use raises too."""
    timer = threading.Timer(_LAST_WORDS_S, os._exit, [status])
    timer.daemon = True
    try:
        timer.start()
        if message:
            print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


#: What runs between the line that calls a captured step and a warning about that call.
_WITHIN = tuple(str(Path(__file__).parent / room) for room in ("step.py", "run", "lower", "capture"))


def warn_caller(message: str) -> None:
    """Warn with the line that called the captured step, or made it."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
    outermost = max((i for i, file in enumerate(files) if file.startswith(_WITHIN)), default=-1)
    warnings.warn(message, stacklevel=outermost + 3)


class CaptureError(ValueError):
    """The training step cannot be captured; the message names the module path and the source line."""

    _noted: ClassVar[list[Exception] | None] = None

    def __init__(self, *args: object):
        super().__init__(*args)
        if CaptureError._noted is not None:
            CaptureError._noted.append(self)


class MovedError(CaptureError):
    """The state of a generator of random numbers changed during a trace: the step changed it, or another thread drew
    from it meanwhile."""

    def __init__(self, message: str):
        main = threading.main_thread(), threading.current_thread()
        names = [thread.name for thread in threading.enumerate() if thread not in main and thread.name != "waiting"]
        if names:
            message += f". Or another thread drew from it (running: {', '.join(names)}): give it its own generator"
        super().__init__(message)


@contextlib.contextmanager
def noting_refusals(noted: list[Exception]) -> Iterator[None]:
    """Inside, each `CaptureError` that is made is added to ``noted``: code that is traced may catch it."""
    before, CaptureError._noted = CaptureError._noted, noted
    try:
        yield
    finally:
        CaptureError._noted = before


class UnlikeError(CaptureError):
    """The microbatches of a batch cannot share one graph."""


class TraceError(CaptureError, RuntimeError):
    """An error of torch's while a step was traced or rewritten, which is its cause."""


def first_line(error: BaseException) -> str:
    """The first line of ``error``, cut to 300 characters."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "(no message)")
    return line if len(line) <= 300 else f"{line[:300]} ..."


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The name in ``allowed`` that ``given`` may be a slip or a part of, or None: a far-fetched hint misleads."""

    def plain(name: str) -> str:
        return name.lstrip("-").replace("_", "-")

    names = {plain(name): name for name in reversed(list(allowed))}
    near = difflib.get_close_matches(plain(given), names, n=1, cutoff=0.7)
    parts = set(re.split(r"[-.]", plain(given)))
    near = near or sorted((name for name in names if parts < set(re.split(r"[-.]", name))), key=len)
    return names[near[0]] if near else None


def require_file(path: Path) -> None:
    """Raise ``ValueError`` where ``path`` is a folder, a pipe or a device. A missing one is accepted."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device, which cannot be read again"
        raise ValueError(f"{path} is {kind}: use a file")


def read_json(path: Path, loads: Callable[[Any], Any] = json.loads) -> Any:
    """What a file of JSON, or of what ``loads`` reads, holds. ``OSError`` where it cannot be read; ``ValueError``, in
    one line without the path, for another text, one that is not UTF-8, or a pipe or device, which might never end."""
    require_file(path)
    return loads(path.read_bytes().decode("utf-8"))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step: a crash leaves the old file or the new one, whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk has room for other files again
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def require_type(name: str, given: object, kind: type, fix: str) -> None:
    """Raise ``ValueError`` unless ``given`` is of ``kind``."""
    if not isinstance(given, kind):
        raise ValueError(f"{name} is of type {type(given).__name__}, not {kind.__name__}: {fix}")


def require_words(name: str, given: object) -> None:
    """Raise ``ValueError`` unless ``given`` is a collection of strings; a string's letters would be its words."""
    if isinstance(given, str):
        raise ValueError(f"{name}={given!r} is one word; allowed is a tuple of them: {name}=({given!r},)")
    if not isinstance(given, Collection) or not all(isinstance(word, str) for word in given):
        raise ValueError(f"{name}={given!r} is not allowed; use a tuple of words, or () for none")


def unknown_name(kind: str, given: object, allowed: Iterable[object]) -> ValueError:
    """A ``ValueError`` that refuses ``given`` and offers the nearest allowed name (or all of them)."""
    allowed = sorted(map(str, allowed))
    near = nearest(given, allowed) if isinstance(given, str) else None
    fix = f"did you mean {near!r}?" if near else f"choose one of {', '.join(allowed)}"
    return ValueError(f"unknown {kind} {given!r}: {fix}")


def unknown_option(given: str, allowed: Iterable[str], command: str = "stepgraph") -> ValueError:
    """A ``ValueError`` that refuses the option ``given`` and offers the nearest of those ``allowed``."""
    near = nearest(given, allowed)
    return ValueError(f"unknown option {given}: " + (f"did you mean {near}?" if near else f"see {command} --help"))

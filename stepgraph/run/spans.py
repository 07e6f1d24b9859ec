"""When the computations of a pipeline's latest step ran on this rank, and which message this rank waits for."""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.graph.step_graph import Call


class Clock:
    """Moments of one step: on the host."""

    def begin(self) -> None:
        """A step begins."""

    def now(self) -> Any:
        """This moment, for `seconds`."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; waits for the latter."""
        return end - begin

    def read(self) -> "Clock":
        """A clock of the same moments, which the next step does not touch."""
        return self


class StreamClock(Clock):
    """Moments on the current stream of a GPU, as events."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class RecordedClock(Clock):
    """Moments of a step that a CUDA graph replays. The host launches the next replay before it asks for the times of
    this one, which would overwrite events. So the GPU writes up to ``room`` times into memory, and each replay is
    followed by a copy of them to the host."""

    def __init__(self, room: int, device: torch.device):
        self.moments = torch.zeros(room, dtype=torch.int64, device=device)
        self.begin()

    def begin(self) -> None:
        self.noted = 0

    def now(self) -> int:
        from stepgraph.kernels.clock_triton import note

        note(self.moments, self.noted)
        self.noted += 1
        return self.noted - 1

    def read(self) -> Clock:
        return _Noted(self.moments)


class _Noted(Clock):
    """Times in ns that were noted on a GPU."""

    def __init__(self, moments: torch.Tensor):
        self.moments = torch.empty(moments.shape, dtype=moments.dtype, pin_memory=True)
        self.moments.copy_(moments, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def seconds(self, begin: int, end: int) -> float:
        self.copied.synchronize()
        return (self.moments[end] - self.moments[begin]).item() / 1e9


class Passed:
    """How far a GPU's stream has come in the calls of one step: an event after each. Another thread may ask."""

    def __init__(self) -> None:
        self._calls: list[tuple[Call, Call | None, torch.cuda.Event]] = []
        self.count = 0
        """Calls that the stream is known to have passed."""

    def note(self, call: Call, received: Call | None) -> None:
        """``call`` has been launched; ``received``: the call that received what it waits for. Not while a CUDA graph is
        recorded, whose replays pass no such event."""
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self._calls.append((call, received, event))

    def pending(self) -> tuple[Call, Call | None] | None:
        """The first call that the stream has not passed, as it was noted; None where it has passed all."""
        calls = self._calls
        while self.count < len(calls) and calls[self.count][2].query():
            self.count += 1
        return calls[self.count][:2] if self.count < len(calls) else None


class Waits:
    """What one step waits for of other stages of a pipeline. ``receive``: the call that received what the process waits
    for now; after a failure it stays. ``latest``: the last one so far."""

    def __init__(self) -> None:
        self.receive: Call | None = None
        self.latest: Call | None = None

    @contextlib.contextmanager
    def on(self, receive: Call | None = None) -> Iterator[None]:
        """The code inside waits, for the message of the call ``receive`` if given."""
        self.receive = receive
        self.latest = receive or self.latest
        yield
        self.receive = None


class Spans:
    """The calls that computed for a stage, each with its begin and end: on a GPU on its stream, on a CPU in the
    process. Made where a step begins."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._start = clock.now()
        self._calls: list[tuple[Call, Any, Any]] = []

    def by(self, clock: Clock) -> "Spans":
        """The same from the readings of ``clock``."""
        found = copy.copy(self)
        found._clock = clock
        return found

    @contextlib.contextmanager
    def on(self, call: Call) -> Iterator[None]:
        """What is inside is ``call``; a message is not noted."""
        if not call.computes:
            yield
            return
        begin = self._clock.now()
        yield
        self._calls.append((call, begin, self._clock.now()))

    def seconds(self) -> list[tuple[Call, float, float]]:
        """(call, begin, end) in order, in seconds since the step began; waits for the step's end."""
        since = functools.partial(self._clock.seconds, self._start)
        return [(call, since(begin), since(end)) for call, begin, end in self._calls]

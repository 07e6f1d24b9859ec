"""When the computations of a pipeline's latest step ran on this rank."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.graph.program import Call


class Spans:
    """The calls that computed for a stage, each with its begin and end: on a GPU on its stream, on a CPU in the
    process."""

    def __init__(self, device: torch.device | None):
        self.on_gpu = device is not None and device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """A step begins; what was noted of the one before is dropped."""
        self._calls: list[tuple[Call, Any, Any]] = []
        self._start = self._now()

    @contextlib.contextmanager
    def on(self, call: Call) -> Iterator[None]:
        """What is inside is ``call``; a message is not noted."""
        stage = call.graph.partition(".")[2]
        if not stage or call.graph.startswith(("send_", "receive_")):
            yield
            return
        begin = self._now()
        yield
        self._calls.append((call, begin, self._now()))

    def seconds(self) -> list[tuple[Call, float, float]]:
        """(call, begin, end) in order, in seconds since the step began; waits for the step's end."""
        return [(call, self._since(begin), self._since(end)) for call, begin, end in self._calls]

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if not self.on_gpu:
            return moment - self._start
        moment.synchronize()
        return self._start.elapsed_time(moment) / 1e3

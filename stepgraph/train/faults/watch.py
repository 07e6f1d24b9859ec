"""A rank that waits in vain for others ends itself, and says where it was waiting.

Each rank has a thread that wakes every half second and writes to the elastic agent's store what the rank is doing, so
that the others, and the launcher, notice a rank that has gone silent. When a step takes far longer than those before
it, or does not react to SIGTERM, the thread reports the node of the graph that the rank waits in and ends the process.
The main thread cannot do that: it is inside a collective that never returns. What may take as long as it likes (a
capture, a validation, a checkpoint) ends so where the next rank has gone silent: each looks after one other.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch import fx

from stepgraph import compat, parallel
from stepgraph.capture.recorder import user_frame
from stepgraph.graph.program import StepProgram
from stepgraph.train.faults.heartbeat import key
from stepgraph.train.faults.in_flight import first_in_flight, issue_order
from stepgraph.train.faults.lost_ranks import report
from stepgraph.train.faults.signals import stopping

_POLL_S = 0.5
#: A rank that has not reported for this long is silent.
_SILENT_S = 8.0
#: How often a rank looks after the next one, where its own work has no limit.
_LOOK_S = 2.0
#: Other ranks that an error names.
_NAMED = 3
#: How much longer than the slowest before it a step may take after SIGTERM. The agent kills 30 s after SIGTERM.
_STOP_S = 10.0
#: How long writing the records at the end of a run may take.
_CLOSING_S = 20.0
#: Where a rank is that no other waits for.
_ENDS = "the end"


class _Place(NamedTuple):
    what: str
    since: float  # time.monotonic()
    limited: bool
    step_began_ns: int | None  # since the epoch; None outside a step


class Watch:
    """A context manager, for the main thread of one of several ranks: inside, the rank is watched.

    ``timeout_s``: how much longer than the slowest before it a step may take; `timed` gives their times, and before its
    first call there is no limit. Where there is none, how long the next rank may be silent. ``on_end``: called with the
    error, in one line, before the process ends with status 1.
    """

    def __init__(self, rank: int, world: int, device_type: str, timeout_s: float, on_end: Callable[[str], None]):
        self.rank, self.world, self.device_type = rank, world, device_type
        self.timeout_s, self.on_end = timeout_s, on_end
        self._order: dict[str, list[fx.Node]] = {}
        self._replays = False
        self._inside: Callable[[], str] = lambda: ""
        self._awaited: Callable[[], str] = lambda: ""
        self._slowest_s: float | None = None
        self._began: dict[int, int] = {}
        self._heard: tuple[bytes | None, float, float] = None, time.monotonic(), 0.0
        self.at("the start", limited=False)

    # ---- called by the main thread ----

    def watches(self, program: StepProgram, inside: Callable[[], str], awaited: Callable[[], str]) -> None:
        """``program``: what the steps run. ``inside``: where in it a step is, such as ``forward.1 of microbatch 3``.
        ``awaited``: whose message it waits for there, such as ``stage 0 on rank 0``."""
        self._inside, self._awaited = inside, awaited
        self._order = {}
        for call in program.schedule:
            for group, nodes in issue_order(program.graphs[call.graph].graph).items():
                self._order.setdefault(group, []).extend(nodes)
        self._replays = program.main.recording is not None

    def at(self, what: str, *, limited: bool = True) -> None:
        """From now on the rank is in ``what``. Not ``limited``: it may take as long as it likes."""
        self._place = _Place(what, time.monotonic(), limited, None)

    def ends(self) -> None:
        """From now on the rank writes what is left to write, and no other waits for it."""
        self.at(_ENDS, limited=False)

    def launches(self, step: int) -> None:
        """From now on the rank is in ``step``, and launches it."""
        first = not self._began
        self._began = {step - 1: self._began.get(step - 1, 0), step: time.time_ns()}
        self.waits_for(step)
        if first and self.world > 1:
            os.write(self._write, b"\0")  # told at once: many steps may pass until the next time

    def waits_for(self, step: int) -> None:
        """From now on the rank waits for the results of ``step``, launched before."""
        self._place = _Place(f"step {step}", time.monotonic(), True, self._began[step])

    def timed(self, seconds: float) -> None:
        """A step took ``seconds``; not called for the first ones, which compile and record."""
        self._slowest_s = max(seconds, self._slowest_s or 0.0)

    @property
    def where(self) -> str:
        """What the rank is in, such as ``step 13``, and of a pipeline's step the call."""
        place = self._place
        inside = self._inside() if place.step_began_ns is not None else ""
        return f"{place.what}, {inside}" if inside else place.what

    def __enter__(self) -> "Watch":
        if self.world == 1:
            return self
        self._done = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Python runs signal handlers in the main thread, which may never return; these bytes are written at once.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._store = parallel.job_store()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.world == 1:
            return
        signal.set_wakeup_fd(self._wakeup)
        self._done.set()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    # ---- the thread ----

    def _watch(self) -> None:
        told: float | None = None
        while not self._done.is_set():
            self._tell()
            if select.select([self._read], [], [], _POLL_S)[0]:
                signals = os.read(self._read, 64)
                if told is None and any(number in signals for number in stopping()):
                    told = time.monotonic()
            place, now = self._place, time.monotonic()
            if not place.limited or self._slowest_s is None:
                if silent := self._silent_next(now):
                    self._end(f"{place.what} has lost {silent}", place)
                continue
            if told is not None and now - max(place.since, told) > self._slowest_s + _STOP_S:
                self._end(f"{place.what} did not stop after SIGTERM", place)
            if now - place.since > self._slowest_s + self.timeout_s:
                limit = f"--comm-timeout {self.timeout_s:g}, and the slowest step took {self._slowest_s:.1f} s"
                self._end(f"{place.what} made no progress for {now - place.since:.0f} s ({limit})", place)

        self._tell()  # that this rank has come to its end

    def _silent_next(self, now: float) -> str:
        """The next rank, which has told nothing for longer than ``timeout_s``; "" while it tells where it is.

        By this rank's clock alone: those of other machines may differ.
        """
        beat, since, looked = self._heard
        if self._store is None or self._place.what == _ENDS or now - looked < _LOOK_S:
            return ""
        rank = (self.rank + 1) % self.world
        try:
            found = self._store.get(key(rank)) if self._store.check([key(rank)]) else None
        except dist.DistError:
            return ""
        self._heard = found, since if found == beat else now, now
        if found != beat or now - since <= max(self.timeout_s, _SILENT_S):
            return ""
        _, what, host, pid = json.loads(found) if found else (None, "the start", "host unknown", "unknown")
        silent = f"silent for {now - since:.0f} s (--comm-timeout {self.timeout_s:g}) since {what}"
        return "" if what == _ENDS else f"rank {rank} ({host}, pid {pid}), {silent}"

    def _end(self, why: str, place: _Place) -> None:
        closing = threading.Timer(_CLOSING_S, os._exit, [1])
        closing.daemon = True
        closing.start()
        error = "; ".join([f"{why}: {self._waits_in(place)}", *self._others(place)])
        report(error)
        self.on_end(error)
        os._exit(1)

    def _waits_in(self, place: _Place) -> str:
        records = compat.flight_records(self.device_type)
        began = (
            [] if place.step_began_ns is None else sorted(t for t in self._began.values() if t >= place.step_began_ns)
        )
        where = f" in {inside}" if (inside := self._inside()) else ""
        if awaited := self._awaited():
            return f"it waits for {awaited}{where}"
        if waiting := first_in_flight(records, self._order, began):
            return f"it waits in {waiting}{where}"
        main: FrameType = sys._current_frames()[threading.main_thread().ident]
        replay = " outside the CUDA graph, which does not tell where it is" if self._replays else ""
        return f"no collective is in flight{replay}{where}, and the process is at {user_frame(main)}"

    # ---- what ranks tell each other ----

    def _tell(self) -> None:
        if self._store is not None:
            try:
                beat = [time.time(), self.where, socket.gethostname(), os.getpid()]
                self._store.set(key(self.rank), json.dumps(beat))
            except dist.DistError:  # the agent is gone: there is nobody to tell
                self._store = None

    def _others(self, place: _Place) -> list[str]:
        """Where the other ranks are that are silent, or not where this one is; the longest silent first."""
        if self._store is None:
            return []
        try:
            beats = self._store.multi_get([key(rank) for rank in range(self.world)])
        except dist.DistError:
            return ["the agent's store does not answer"]
        found = []
        for rank, beat in enumerate(beats):
            at, what, host, pid = json.loads(beat)
            silent = time.time() - at
            if rank != self.rank and (silent > _SILENT_S or what.partition(",")[0] != place.what):
                found.append((silent, f"rank {rank} ({host}, pid {pid}) was in {what} {silent:.0f} s ago"))
        more = [f"and {len(found) - _NAMED} other ranks are silent or elsewhere"] if len(found) > _NAMED else []
        return [text for _, text in sorted(found, reverse=True)[:_NAMED]] + more

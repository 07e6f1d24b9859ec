"""A rank that waits too long for others ends itself, and says where it was waiting.

Each rank has a thread that wakes every half second and writes to the elastic agent's store what the rank is doing, so
that the others, and the launcher, notice a rank that has gone silent. When a step takes far longer than the slowest
before it, or does not react to SIGTERM, the thread reports the node of the graph, or the call of a pipeline, that the
rank waits in and ends the process. The main thread cannot do that: it is inside a collective that never returns.

The first steps have no earlier step to compare with, and they compile. They are ended when no rank has made progress
for a long time: a rank makes progress while its Python runs, while it waits for its own compilers, and while its GPU
passes calls. What may take any time (a capture, a validation, a checkpoint) is ended when the next rank has gone
silent: each rank watches one other.

Ages are measured by one rank's clock, from when it saw something change: the clocks of machines differ.

This module also finds the node of the graph whose collective the ranks are waiting in.

torch's flight recorder knows the process group of each collective, when it was issued and whether it is done, but not
its node. A step issues each group's collectives in the graph's order, which Inductor keeps. So the k-th collective that
a group issued since the step began is the group's k-th node.
"""

import bisect
import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import fx

from stepgraph import compat, parallel
from stepgraph.capture.recorder import user_frame
from stepgraph.graph.collectives import group_of, is_nccl, stage_of
from stepgraph.graph.facts import OpOverload
from stepgraph.graph.program import StepProgram
from stepgraph.graph.provenance import provenance
from stepgraph.run.watch.heartbeat import key
from stepgraph.run.watch.lost_ranks import report
from stepgraph.run.watch.signals import stopping


class InFlight(NamedTuple):
    """A collective that was issued and is not done. ``node``: its node, or None if it is not one of the step's.
    ``what``: the recorder's name for the operation. ``others``: how many issued after it are not done either."""

    node: fx.Node | None
    what: str
    others: int

    def __str__(self) -> str:
        more = f" ({self.others} issued after it wait too)" if self.others else ""
        return f"{self.what if self.node is None else describe(self.node)}{more}"


def issue_order(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The collectives of each process group, by torch's name of it, in the order in which a step issues them."""
    order: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_nccl(node) and stage_of(node) == "begin":
            order[compat.group_name(group_of(node))].append(node)
    return dict(order)


def first_in_flight(
    records: Sequence[Mapping[str, Any]], order: Mapping[str, Sequence[fx.Node]], began_ns: Sequence[int]
) -> InFlight | None:
    """The earliest of the collectives in ``records`` (see `compat.flight_records`) that is not done; None if all are.

    ``order``: as `issue_order` gives it. ``began_ns``: when the launch of each of the latest steps began, the earliest
    first, in nanoseconds since the epoch; there are several because on a GPU the next step is launched before the
    results of one are read. A collective gets no node if the graph has none in its place, or one of another size.
    """
    numbers: dict[tuple[str, int], int] = defaultdict(int)
    waiting: list[tuple[Mapping[str, Any], fx.Node | None]] = []
    for record in records:
        group = record["process_group"][0]
        node = None
        if step := bisect.bisect_right(began_ns, record["time_created_ns"]):
            nodes, number = order.get(group, ()), numbers[group, step]
            numbers[group, step] += 1
            node = nodes[number] if number < len(nodes) and _fits(nodes[number], record) else None
        if not record["retired"] and record["state"] != "completed":
            waiting.append((record, node))
    if not waiting:
        return None
    record, node = waiting[0]
    operation = record["profiling_name"].partition(":")[2]
    return InFlight(node, f"{operation} of process group {record['process_group'][1]}", len(waiting) - 1)


def _fits(node: fx.Node, record: Mapping[str, Any]) -> bool:
    """Whether record and node have equally many input elements; their names depend on the backend."""
    return node.args[0].meta["val"].numel() == sum(map(math.prod, record["input_sizes"]))


def describe(node: fx.Node) -> str:
    """``name (operator) of module path, phase, file:line``."""
    found = provenance(node)
    operator = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else str(node.target)
    file, _, line = found.source.rpartition(":")
    return f"{node.name} ({operator}) of {found.path or 'the model'}, {found.phase}, {os.path.basename(file)}:{line}"


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
#: What the store holds of the rank that moved last in a first step.
_MOVED = "moved"
#: Innermost files of a thread that waits for its own process's threads and compilers, and not for a GPU or a rank.
_OWN_WAITS = ("threading.py", "subprocess.py", "selectors.py", "connection.py", "queue.py", "_base.py", "popen_fork.py")


class Step(Protocol):
    """What runs a rank's steps, such as a `CapturedStep`. ``where()``: where in it a step is, such as ``forward.1 of
    microbatch 3``; ``awaited()``: whose message it waits for there, such as ``stage 0 on rank 0``; "" for neither.
    ``passed()``: calls that the GPU has passed."""

    program: StepProgram

    def where(self) -> str: ...

    def awaited(self) -> str: ...

    def passed(self) -> int: ...


class _Place(NamedTuple):
    what: str
    since: float  # time.monotonic()
    limited: bool
    step_began_ns: int | None  # since the epoch; None outside a step


class Watch:
    """A context manager, for the main thread of one of several ranks: inside, the rank is watched.

    ``timeout_s``: how much longer than the slowest before it a step may take; `timed` gives their times. Where there is
    no limit, how long the next rank may be silent. ``first_timeout_s``: before the first call of `timed`, how long no
    rank may move in a step. Without an elastic agent, whose store says whether others move, ``timeout_s`` if that is
    more. ``on_end``: called with the error, in one line, before the process ends with status 1.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device_type: str,
        timeout_s: float,
        first_timeout_s: float,
        on_end: Callable[[str], None],
    ):
        self.rank, self.world, self.device_type = rank, world, device_type
        self.timeout_s, self.first_timeout_s, self.on_end = timeout_s, first_timeout_s, on_end
        self._order: dict[str, list[fx.Node]] = {}
        self._replays = False
        self._step: Step | None = None
        self._slowest_s: float | None = None
        self._warm_s = 0.0
        self._began: dict[int, int] = {}
        now = time.monotonic()
        self._heard: tuple[bytes | None, float, float] = None, now, 0.0  # of the next rank: what, since when, looked
        self._seen: tuple[bytes | None, float, float] = None, now, 0.0  # the same of whoever moved last
        self._position: tuple = ()
        self._moved = now
        self.at("the start", limited=False)

    # ---- called by the main thread ----

    def watches(self, step: Step) -> None:
        """``step`` runs the steps from now on."""
        self._step, program = step, step.program
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
            os.write(self._write, b"\0")  # reported at once: many steps may pass until the next time

    def waits_for(self, step: int) -> None:
        """From now on the rank waits for the results of ``step``, launched before."""
        self._place = _Place(f"step {step}", time.monotonic(), True, self._began[step])

    def timed(self, seconds: float) -> None:
        """A step took ``seconds``; not called for the first ones, which compile and record."""
        self._slowest_s = max(seconds, self._slowest_s or 0.0)

    def warmed(self, seconds: float) -> None:
        """One of the first steps took ``seconds``. What replays it as a CUDA graph takes no longer, and shows no call
        that passes."""
        self._warm_s = max(seconds, self._warm_s)

    @property
    def where(self) -> str:
        """What the rank is in, such as ``step 13``, and of a pipeline's step the call and whom it waits for."""
        place = self._place
        if place.step_began_ns is None or self._step is None:
            return place.what
        inside, awaited = self._step.where(), self._step.awaited()
        return place.what + (f", {inside}" if inside else "") + (f", waiting for {awaited}" if awaited else "")

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
            self._report()
            if select.select([self._read], [], [], _POLL_S)[0]:
                signals = os.read(self._read, 64)
                if told is None and any(number in signals for number in stopping()):
                    told = time.monotonic()
            place, now = self._place, time.monotonic()
            self._look_after_next(now)
            if not place.limited or self._slowest_s is None:
                if silent := self._silent_next(now):
                    self._end(f"{place.what} has lost {silent}", place)
                still, limit = self._still_s(place, now), self._warm_s + self._first_limit_s
                if place.limited and still > limit:
                    why = f"{place.what} made no progress for {still:.0f} s, nor did any other rank"
                    self._end(f"{why} (--first-step-timeout {self.first_timeout_s:g})", place, everyone=True)
                continue
            if told is not None and now - max(place.since, told) > self._slowest_s + _STOP_S:
                self._end(f"{place.what} did not stop after SIGTERM", place)
            if now - place.since > self._slowest_s + self.timeout_s:
                limit = f"--comm-timeout {self.timeout_s:g}, and the slowest step took {self._slowest_s:.1f} s"
                self._end(f"{place.what} made no progress for {now - place.since:.0f} s ({limit})", place)

        self._report()  # that this rank has ended

    @property
    def _first_limit_s(self) -> float:
        return self.first_timeout_s if self._store is not None else max(self.first_timeout_s, self.timeout_s)

    def _still_s(self, place: _Place, now: float) -> float:
        """Seconds since this rank moved, or another one is known to have, in ``place``."""
        if not place.limited:
            self._moved = now
            return 0.0
        # Without Python's own threads, of which a progress bar's always moves; with autograd's, which compile.
        ours = {t.ident for t in threading.enumerate() if isinstance(t, threading._MainThread | threading._DummyThread)}
        aside = {t.ident for t in threading.enumerate()} - ours
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident not in aside}
        position = (place, self._step.passed() if self._step is not None else 0)
        position += tuple((ident, id(frame), frame.f_lasti) for ident, frame in frames.items())
        compiles = any(Path(frame.f_code.co_filename).name in _OWN_WAITS for frame in frames.values())
        found, since, looked = self._seen
        with self._lost_store():
            if position != self._position or compiles:
                self._position, self._moved = position, now
                if self._store is not None:
                    self._store.set(_MOVED, f"{self.rank} {now}")
            elif self._store is not None and now - looked >= _LOOK_S:
                latest = self._store.get(_MOVED) if self._store.check([_MOVED]) else None
                self._seen = latest, since if latest == found else now, now
        return now - max(self._moved, self._seen[1], place.since)

    def _look_after_next(self, now: float) -> None:
        beat, since, looked = self._heard
        if self._store is None or now - looked < _LOOK_S:
            return
        name = key((self.rank + 1) % self.world)
        with self._lost_store():
            found = self._store.get(name) if self._store.check([name]) else None
            self._heard = found, since if found == beat else now, now

    def _silent_next(self, now: float) -> str:
        """The next rank, which has reported nothing for longer than ``timeout_s``; "" while it reports where it is."""
        beat, since, _ = self._heard
        if self._store is None or self._place.what == _ENDS or now - since <= max(self.timeout_s, _SILENT_S):
            return ""
        rank = (self.rank + 1) % self.world
        silent = f"silent for {now - since:.0f} s (--comm-timeout {self.timeout_s:g})"
        if beat is None:
            return f"rank {rank}, {silent} since the start"
        _, what, host, pid, *_ = json.loads(beat)
        return "" if what == _ENDS else f"rank {rank} ({host}, pid {pid}), {silent} since {what}"

    @contextlib.contextmanager
    def _lost_store(self) -> Iterator[None]:
        """Inside, the agent may be gone: then there is no store any more."""
        try:
            yield
        except dist.DistError:
            self._store = None

    def _end(self, why: str, place: _Place, everyone: bool = False) -> None:
        closing = threading.Timer(_CLOSING_S, os._exit, [1])
        closing.daemon = True
        closing.start()
        try:
            error = "; ".join([f"{why}: {self._waits_in(place)}", *self._others(place, everyone)])
        except Exception as failure:  # the rank ends anyway
            error = f"{why}: where it waits is not known, {type(failure).__name__}: {failure}"
        report(error)
        self.on_end(error)
        os._exit(1)

    def _waits_in(self, place: _Place) -> str:
        inside, awaited = ("", "") if self._step is None else (self._step.where(), self._step.awaited())
        where = f" in {inside}" if inside else ""
        if awaited:
            return f"it waits for {awaited}{where}"
        started = [t for t in self._began.values() if place.step_began_ns is not None and t >= place.step_began_ns]
        if waiting := first_in_flight(compat.flight_records(self.device_type), self._order, sorted(started)):
            return f"it waits in {waiting}{where}"
        main: FrameType = sys._current_frames()[threading.main_thread().ident]
        replay = " outside the CUDA graph, which does not say where it is" if self._replays else ""
        return f"no collective is in flight{replay}{where}, and the process is at {user_frame(main)}"

    # ---- messages between ranks ----

    def _report(self) -> None:
        if self._store is not None:
            silent = time.monotonic() - self._heard[1]
            beat = [time.time(), self.where, socket.gethostname(), os.getpid(), round(silent, 1)]
            with self._lost_store():
                self._store.set(key(self.rank), json.dumps(beat))

    def _others(self, place: _Place, everyone: bool) -> list[str]:
        """Where the other ranks are that are silent, or not where this one is, or with ``everyone``, or where none is,
        all; the longest silent first. Each rank reports how long the next one has been silent."""
        if self._store is None:
            return []
        beats: dict[int, list] = {}
        with self._lost_store():
            for rank in range(self.world):
                if self._store.check([key(rank)]):  # to get what is not there waits for it
                    beats[rank] = json.loads(self._store.get(key(rank)))
        if self._store is None:
            return ["the agent's store does not answer"]
        silent_s = {(rank + 1) % self.world: beat[4] for rank, beat in beats.items()}
        silent_s[(self.rank + 1) % self.world] = time.monotonic() - self._heard[1]
        found, along = [], []
        for rank in set(range(self.world)) - {self.rank}:
            silent = silent_s.get(rank, 0.0)
            if rank not in beats:
                found.append((silent, f"rank {rank} has not reported since the start"))
                continue
            _, what, host, pid, _ = beats[rank]
            late = silent > _LOOK_S + 2 * _POLL_S
            when = f"was in {what} {silent:.0f} s ago" if late else f"is in {what}"
            text = f"rank {rank} ({host}, pid {pid}) {when}"
            (found if everyone or late or what.partition(",")[0] != place.what else along).append((silent, text))
        named = sorted(found or along, reverse=True)
        more = [f"and {len(named) - _NAMED} other ranks"] if len(named) > _NAMED else []
        return [text for _, text in named[:_NAMED]] + more

"""Processes that compile some of a step's pieces while this one compiles others.

Inductor's own workers compile kernels; what writes these kernels is Python, which takes a piece after the other: half a
second to two for each of the 14 structures of a transformer of equal blocks. A helper does all of it. It gives nothing
back: what it made lies in Inductor's cache on disk, where this process finds it as a second start does. So a piece that
a helper cannot compile, or compiles to another key, is compiled here.
"""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from stepgraph import compat
from stepgraph.graph import collectives
from stepgraph.inductor.packed import NotSavable, pack
from stepgraph.passes.compile.child import Child

Key = TypeVar("Key", bound=Hashable)
#: Pieces by key, with their options.
Work = Mapping[Key, tuple[fx.GraphModule, dict[str, Any]]]

#: The most that a rank starts; with that many, this process compiles nothing. Each holds a GPU context of half a GB.
_MOST, _CORES_OF_EACH = 8, 2
#: Seconds for which this process waits for a piece (one that takes longer is compiled here), and for a killed helper to
#: end: the driver can take long to free its context, and other ranks may already wait for this one in a collective.
_LIMIT_S, _END_S = 120, 2


class Request(NamedTuple):
    """Compile ``pieces``, as `pack` gives them, for the GPU number ``device`` (None: for CPUs), under Inductor's
    ``settings``, of a process whose ``workers`` compile kernels. ``place``: its (rank, ranks), None where it is
    alone; ``groups``: the ranks of each process group that the pieces name."""

    settings: tuple[Any, ...]
    workers: dict[str, Any]
    device: int | None
    pieces: list[bytes]
    place: tuple[int, int] | None = None
    groups: dict[str, list[int]] = {}


class Team(Child):
    """Helpers, which are forks of one process: what they need is imported once. Each ends with its request, or when
    this process does."""

    def __init__(self, count: int) -> None:
        # Kernels are compiled by forks of the helpers: Inductor's pool would take as long to start as it has to do.
        # CUDA, which torch would begin to use while it is imported, works in no fork of a process that uses it.
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        super().__init__("stepgraph.passes.compile.helper", subprocess.DEVNULL, count, **settings)
        self.device: int | None = None

    def get_ready(self, device: int) -> None:
        """Ask them to create a context on the GPU ``device``; later calls do nothing."""
        if self.device is None:
            self.device = device
            for connection in self.connections:
                self.send(connection, device)

    def send(self, connection: Connection, what: Any) -> None:
        """Send ``what`` to a helper. It may have ended: then `answer` says so."""
        with contextlib.suppress(OSError):
            connection.send(what)

    def answered(self, connections: list[Connection]) -> Sequence[Any]:
        """The first of these helpers to have compiled their next piece, or ended; all if none has in time."""
        closed = [connection for connection in connections if connection.closed]
        return closed or wait(connections, _LIMIT_S) or connections

    def answer(self, connection: Connection) -> str | None:
        """Why a helper of `answered` did not compile its next piece, or None."""
        try:
            if connection.poll():
                return connection.recv()
        except (EOFError, OSError):  # closed here, too
            return "the process that was to compile it has ended"
        connection.close()  # what it compiles is not waited for
        return f"not finished within {_LIMIT_S} s"

    def end(self) -> None:
        """End them. The process that they are forks of ends last, so that their memory is free then."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)


_started: list[Team] = []


def start_helpers() -> None:
    """Start as many as this rank's share of the cores that Inductor may use allows. They import, and get ready for this
    process's GPU if it already uses one."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    cores = min(compat.compile_threads(), (os.cpu_count() or 1) // ranks)
    _started[:] = [team for team in _started if team.process.poll() is None]  # a team may have died
    if (count := min(_MOST, cores // _CORES_OF_EACH)) and not _started:
        _started.append(Team(count))
    if _started and torch.cuda.is_initialized():
        _started[0].get_ready(torch.cuda.current_device())


@atexit.register
def end_helpers() -> None:
    """End the helpers that were started and have nothing to do."""
    while _started:
        _started.pop().end()


def drop_helpers() -> None:
    """End, in the background, helpers that got no work, as when a saved step is loaded: each holds a GPU context."""
    teams, _started[:] = [*_started], []
    for team in teams:
        threading.Thread(target=team.end).start()


class Helpers:
    """The ones that were started, for the pieces of one graph: ``with Helpers() as helpers``, `share`, and compile in
    the order that it gives."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._team = _started.pop() if _started else None
        self.compiled, self.on_disk = 0, False

    def __enter__(self) -> "Helpers":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End them: what they have not compiled is left to this process."""
        team, self._team = self._team, None
        if team is not None:
            team.end()

    def share(self, work: Work) -> Iterator[Key]:
        """Hand out the pieces. The result is all of them in the order in which to compile or load them here: those of
        this process, others while they are on disk, then the helpers' as they are done."""
        helpers = self._team.connections if work and self._team is not None else []
        small = sorted(work, key=lambda key: len(work[key][0].graph.nodes))
        mine = small[:1] if helpers and compat.inductor_has_cached() else []
        rest = {key: work[key] for key in work if key not in mine}
        shares = _shares(rest, len(helpers) + (len(helpers) < _MOST))
        mine += itertools.chain(*shares[len(helpers) :])
        given: dict[Connection, list[Key]] = {}
        for helper, keys in zip(helpers, shares, strict=False):
            packed = {}
            for key in keys:
                try:
                    packed[key] = pack(*work[key])
                except NotSavable as reason:
                    mine.append(key)
                    self._missed(str(reason))
            if packed:
                # A large one waits in its thread until the helper has imported what it needs.
                request = _request(work, list(packed.values()))
                threading.Thread(target=self._team.send, args=(helper, request), daemon=True).start()
                given[helper] = list(packed)
        return self._order(mine, given, [key for key in small if key not in mine])

    def _order(self, mine: list[Key], given: dict[Connection, list[Key]], others: list[Key]) -> Iterator[Key]:
        yield from mine
        while self.on_disk and others:
            yield others.pop(0)
        while others:
            for helper in [*given] if self._team is None else self._team.answered([*given]):
                key, reason = given[helper].pop(0), self._team and self._team.answer(helper)
                if key in others:
                    others.remove(key)
                    if self._team is not None:
                        self._noted(reason)
                    yield key
                if not given[helper]:
                    del given[helper]

    def _noted(self, reason: str | None) -> None:
        if reason is None:
            self.compiled += 1
        else:
            self._missed(reason)

    def _missed(self, reason: str) -> None:
        note = f"a piece not compiled by a helper: {reason}"[:200]
        if note not in self.notes:
            self.notes.append(note)


def _shares(work: Work, count: int) -> list[list[Key]]:
    """The keys of ``work`` in ``count`` lists of about as many nodes, each in its order."""
    sizes = {key: len(piece.graph.nodes) for key, (piece, _) in work.items()}
    owner: dict[Key, int] = {}
    loads = [0] * count
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        owner[key] = loads.index(min(loads))
        loads[owner[key]] += sizes[key]
    return [[key for key in work if owner[key] == i] for i in range(count)]


def _request(work: Work, pieces: list[bytes]) -> Request:
    values = (n.meta["val"] for piece, _ in work.values() for n in piece.graph.find_nodes(op="placeholder"))
    device = next((value.device.index or 0 for value in values if value.is_cuda), None)
    compat.compile_threads()  # first: it may be settled only now
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    nodes = (node for piece, _ in work.values() for node in piece.graph.nodes)
    names = sorted({collectives.group_of(n) for n in nodes if collectives.stage_of(n) not in (None, "wait")})
    groups = {name: dist.get_process_group_ranks(compat.process_group(name)) for name in names}
    return Request(compat.inductor_settings(), compat.inductor_workers(), device, pieces, place, groups)

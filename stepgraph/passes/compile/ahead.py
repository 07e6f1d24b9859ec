"""Our own Triton kernels, compiled in another process while Inductor works.

Otherwise Triton would compile each at its first launch, one after another: 13 of the 45 seconds to the first step of a
mixture of experts on an H100. Nothing is launched and nothing of the step changes: what is compiled lies in Triton's
cache on disk, where the first launch finds it.
"""

import contextlib
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import packet
from stepgraph.kernels.ahead import LAUNCHING, sources_of
from stepgraph.kernels.compile_worker import Request
from stepgraph.passes.compile.child import Child

#: Seconds for which the first launch waits at most: what takes longer is compiled there.
_LIMIT_S = 60

_NUMBERS = itertools.count()


class _Worker(Child):
    """The other process, see `stepgraph.kernels.compile_worker`. It serves all graphs of this one: importing torch
    takes longer than compiling most kernels."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__("stepgraph.kernels.compile_worker", self.said)

    def last_line(self) -> str:
        """The last line that the process printed, once it has ended."""
        self.process.wait()
        self.said.seek(0)
        return (self.said.read().decode(errors="replace").strip().splitlines() or ["its process has ended"])[-1]


_running: list[_Worker] = []


def start_worker() -> _Worker:
    """The process that compiles, which first imports; started if there is none."""
    if not _running or _running[0].owner != os.getpid() or _running[0].process.poll() is not None:
        _running[:] = [_Worker()]
    return _running[0]


class Ahead:
    """The kernels of the graphs of a step: made before Inductor makes or loads kernels, then `start`, and `finish`
    before the step is run. Does nothing for graphs that launch none of our kernels."""

    def __init__(self, graphs: Iterable[fx.Graph]):
        self.notes: list[str] = []
        self._calls = list(calls(graphs))
        if self._calls and compat.triton_interprets():
            self._calls = []
        self._environment = compat.triton_environment() if self._calls else {}
        self._asked: list[compat.TritonSource] = []
        self._number = next(_NUMBERS)
        self._worker: _Worker | None = None
        self._started = False

    def start(self) -> None:
        """Find what the graphs will launch, and have compiled what is not on disk."""
        self._started = True
        if not self._calls:
            return
        cache, sources = compat.triton_cache(self._calls[0][-1]), {}
        for operator, args, kwargs, _ in self._calls:
            try:
                found = {repr(source): source for source in sources_of(operator, args, kwargs)}
                sources |= {key: source for key, source in found.items() if not compat.triton_cached(source)}
            except Exception as failure:  # it is compiled at its first launch, which shows what is wrong
                lines = str(failure).strip().splitlines() or [""]
                self._missed(operator, f"{type(failure).__name__}: {lines[-1]}")
        self._asked = list(sources.values())
        if not self._asked:
            return
        environment = self._environment | {"TRITON_CACHE_DIR": cache}
        request = Request(
            self._number, environment, compat.triton_target(), self._asked, launchers=torch.cuda.is_available()
        )
        self._worker = start_worker()
        with contextlib.suppress(ConnectionError):  # it has ended already: `finish` says why
            self._worker.connection.send(request)

    def finish(self) -> list[str]:
        """Wait for the compilations, starting them now if needed; lines for the report."""
        if not self._started:
            self.start()
        if self._worker is None:
            return self.notes
        results, until, last = [], time.monotonic() + _LIMIT_S, f"not finished within {_LIMIT_S} s"
        try:
            while len(results) < len(self._asked) and self._worker.connection.poll(max(0, until - time.monotonic())):
                number, name, error = self._worker.connection.recv()
                if number == self._number:  # else of a step that was given up
                    results.append((name, error))
        except (EOFError, ConnectionError):
            last = self._worker.last_line()
        failed = [(name, error) for name, error in results if error is not None]
        for name, error in failed:
            self._missed(name, error)
        if missing := len(self._asked) - len(results):
            self.end()
            self._missed(f"{missing} of our own kernels", last)
        made = Counter(name for name, error in results if error is None)
        found = [source.function[1] for source in self._asked if compat.triton_cached(source)] if made else []
        for name in made - Counter(found):
            self._missed(name, "this process has another key for it")
        if found:
            self.notes.append(f"{len(found)} of our own kernels compiled ahead")
        return self.notes

    def end(self) -> None:
        """End what was started: the step will not be run."""
        if self._worker is not None:
            self._worker.process.kill()
            self._worker.process.wait()

    def _missed(self, what: str, why: str) -> None:
        self.notes.append(f"not compiled ahead: {what}: {why}"[:200])


def calls(graphs: Iterable[fx.Graph]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any], int]]:
    """(operator, arguments with fake tensors, keywords, index of the GPU) of each node that launches our kernels, one
    for all that are alike."""
    seen = set()
    for node in (node for graph in graphs for node in graph.nodes):
        name = getattr(packet(node), "__name__", None) if getattr(node.target, "namespace", "") == "stepgraph" else None
        tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if name not in LAUNCHING or not any(t.is_cuda for t in tensors):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        key = (name, repr(compat.pytree.tree_map_only(torch.Tensor, _form, (args, dict(kwargs)))))
        if key not in seen:
            seen.add(key)
            device = next(t.device.index for t in tensors if t.is_cuda)
            yield name, args, dict(kwargs), device or 0


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), compat.misalignment(tensor), str(tensor.device)

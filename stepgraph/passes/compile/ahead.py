"""Our own Triton kernels compiled in a process beside Inductor.

Otherwise Triton would compile each at its first launch, one after another: 13 of the 45 seconds to the first step of a
mixture of experts on an H100. Nothing is launched and nothing of the step changes: what is compiled lies in Triton's
cache on disk, where the first launch finds it.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import packet
from stepgraph.kernels.ahead import LAUNCHING, sources_of
from stepgraph.kernels.compile_worker import Request

#: Seconds for which the first launch waits at most: what takes longer is compiled there.
_LIMIT_S = 60


class Ahead:
    """The kernels of one graph: `start` them, and `finish` before the step is run."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.notes: list[str] = []
        self._asked = 0
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Find what the graph will launch, and have it compiled."""
        sources: dict[str, compat.TritonSource] = {}
        found = list(calls(self.graph))
        for operator, args, kwargs, _ in found:
            try:
                sources |= {repr(source): source for source in sources_of(operator, args, kwargs)}
            except Exception as failure:  # it is compiled at its first launch, which shows what is wrong
                lines = str(failure).strip().splitlines() or [""]
                self.notes.append(f"not compiled ahead: {operator}: {type(failure).__name__}: {lines[-1]}"[:200])
        if not sources:
            return
        self._asked = len(sources)
        device = found[0][-1]
        request = Request(compat.triton_cache(device), compat.triton_target(), list(sources.values()))
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "stepgraph.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            self._worker.stdin.write(pickle.dumps(request))
            self._worker.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already: `finish` says why

    def finish(self) -> list[str]:
        """Wait for what was started; lines for the report."""
        if self._worker is None:
            return self.notes
        try:
            said, errors = self._worker.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            said, errors = self._worker.communicate()
        results = [json.loads(line) for line in said.splitlines() if line.startswith(b"[")]
        made = sum(error is None for _, error in results)
        self.notes += [f"not compiled ahead: {name}: {error}"[:200] for name, error in results if error is not None]
        if missing := self._asked - len(results):
            last = (errors.decode(errors="replace").strip().splitlines() or [f"not done within {_LIMIT_S} s"])[-1]
            self.notes.append(f"not compiled ahead: {missing} of our own kernels: {last}"[:200])
        if made:
            self.notes.append(f"{made} of our own kernels compiled beside Inductor's")
        return self.notes


def calls(graph: fx.Graph) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any], int]]:
    """(operator, arguments with fake tensors, keywords, index of the GPU) of each node that launches our kernels, one
    for all that are alike."""
    seen = set()
    for node in graph.nodes:
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

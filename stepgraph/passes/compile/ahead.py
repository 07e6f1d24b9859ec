"""Our own Triton kernels compiled while Inductor compiles, in its worker processes.

Otherwise Triton would compile each at its first launch, one after another: 13 of the 45 seconds to the first step of a
mixture of experts on an H100. Nothing is launched and nothing of the step changes: a worker leaves what it compiled in
Triton's cache on disk, where the first launch finds it.
"""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from stepgraph import compat
from stepgraph.graph.facts import packet
from stepgraph.kernels.ahead import LAUNCHING, sources_of

#: Seconds for which the first launch waits at most: a worker that takes longer is not needed for it.
_LIMIT_S = 60


class Ahead:
    """The kernels of one graph: `start` them, and `finish` before the step is run."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.notes: list[str] = []
        self._running: dict[concurrent.futures.Future, str] = {}

    def start(self) -> None:
        """Find what the graph will launch and hand it to the workers."""
        sources, target = {}, None
        for operator, args, kwargs, device in calls(self.graph):
            try:
                found = sources_of(operator, args, kwargs)
            except Exception as failure:  # it is compiled at its first launch, which shows what is wrong
                self.notes.append(f"not compiled ahead: {operator}: {_line(failure)}")
                continue
            sources |= {(repr(source), device): source for source in found}
        for (_, device), source in sources.items():
            target = target or compat.triton_target()
            future = compat.submit_to_compile_workers(compat.compile_into, compat.triton_cache(device), source, target)
            if future is None:
                return
            self._running[future] = source.function[1]

    def finish(self) -> list[str]:
        """Wait for the workers; lines for the report."""
        done, late = concurrent.futures.wait(self._running, timeout=_LIMIT_S)
        failed = {self._running[f]: f.exception() for f in done if f.exception() is not None}
        self.notes += [f"not compiled ahead: {name}: {_line(failure)}" for name, failure in failed.items()]
        self.notes += [f"not compiled ahead: {self._running[f]}: it takes over {_LIMIT_S} s" for f in late]
        if count := len(done) - len(failed):
            self.notes.append(f"{count} of our own kernels compiled beside Inductor's")
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


def _line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[-1]}"[:160]

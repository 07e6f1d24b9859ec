"""Memory shared by the forms of one step: they never run at once, and their results are copied at once."""

import weakref
from typing import Any

import torch
from torch import Tensor

from stepgraph.graph.program import StepProgram
from stepgraph.graph.values import Accumulator

#: Each accumulator with its shape, stride, dtype and device.
_Forms = tuple[tuple[Accumulator, torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]

#: Accumulators begin at multiples of this many elements: what reads them is then aligned, as in memory of their own.
_ALIGNED = 128


class Memory:
    """Sums of gradients, and the pool of CUDA graphs: each graph may use the memory that the others leave free."""

    def __init__(self) -> None:
        self._sums: dict[_Forms, tuple[list[Tensor], dict[Accumulator, Tensor]]] = {}
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def accumulators(self, program: StepProgram) -> tuple[list[Tensor], dict[Accumulator, Tensor]]:
        """(flat buffers, one for each dtype and device; the accumulators of ``program`` in them)."""
        values = {
            what: node.meta["val"]
            for step in program.graphs.values()
            for node, what in step.bound()
            if isinstance(what, Accumulator)
        }
        forms = tuple((what, v.shape, v.stride(), v.dtype, v.device) for what, v in values.items())
        if forms not in self._sums:
            self._sums[forms] = _allocate(forms)
        return self._sums[forms]

    def pool(self, graph: torch.cuda.CUDAGraph) -> Any:
        """The memory pool, which ``graph`` joins. It is another one where no graph is left in it: torch refuses a pool
        without graphs, as long as some of its memory was not given back."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._pool


def _allocate(forms: _Forms) -> tuple[list[Tensor], dict[Accumulator, Tensor]]:
    places: dict[Accumulator, int] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for what, shape, _, dtype, device in forms:
        places[what] = sizes.get((dtype, device), 0)
        sizes[dtype, device] = places[what] + -(-shape.numel() // _ALIGNED) * _ALIGNED
    flat = {key: torch.empty(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    views = {what: flat[d, dev].as_strided(shape, stride, places[what]) for what, shape, stride, d, dev in forms}
    return list(flat.values()), views

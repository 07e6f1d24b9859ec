"""The number of chunks of an expert layer's tokens, by the layer's forecast time, forward and backward.

With one part computation waits while tokens are sent to experts and back, except for shared experts. With more, one
part travels while another is computed; products have fewer rows and read the weights again, and gradients of weights
are added up. Links and multiprocessors are taken as two resources that each do one thing at a time, in the order of
`stepgraph.parallel.experts`; routing as balanced. Times are those of `ASSUMED`, so all ranks and a forecast
choose the same.
"""

from typing import NamedTuple

import torch

from stepgraph.costs.hardware import ASSUMED, FP8_REACHED, GROUPED_REACHED, LAUNCH_S
from stepgraph.costs.links import collective_seconds

#: Numbers of parts that there are to choose from, and the share of time that more parts have to save.
CHOICES, LEAST = (1, 2, 4), 0.02


class Layer(NamedTuple):
    """A layer of experts on a rank.

    ``tokens``: of a microbatch; ``slots``: experts of each; ``dim``, ``width``: of a token and of an expert's SwiGLU;
    ``here``: experts on this rank, of ``ranks``; ``shared``: the width of shared experts. ``room``: rows that are sent
    over rows that there are. ``fp8``: products in it, and what travels to experts; ``recomputed``: whether backward
    computes the experts again.
    """

    tokens: int
    slots: int
    dim: int
    width: int
    here: int
    ranks: int
    shared: int
    room: float
    itemsize: int
    fp8: bool
    recomputed: bool


class Chosen(NamedTuple):
    """``chunks``, and the seconds of a layer by number of parts."""

    chunks: int
    seconds: dict[int, float]

    def line(self) -> str:
        """What was chosen, and why."""
        times = ", ".join(f"{1e3 * seconds:.2f} in {chunks}" for chunks, seconds in self.seconds.items())
        return f"expert_chunks=auto: {self.chunks}; a layer of experts takes {times} parts (ms by forecast)"


def choose(layer: Layer) -> Chosen:
    """The fewest parts that no other number saves `LEAST` of the time of."""
    seconds = {chunks: layer_seconds(layer, chunks) for chunks in CHOICES if chunks <= layer.tokens}
    best = min(seconds.values())
    return Chosen(next(c for c, s in seconds.items() if s * (1 - LEAST) <= best), seconds)


def layer_seconds(layer: Layer, chunks: int) -> float:
    """Seconds of the layer, forward and backward."""
    rows = layer.tokens * layer.slots / chunks
    matrices = 3 * layer.dim * layer.width * layer.here
    values = rows * (3 * layer.dim + 4 * layer.width)  # read and written by the two products
    plain = torch.bfloat16 if layer.itemsize == 2 else torch.float32
    dtype, reached = (torch.float8_e4m3fn, FP8_REACHED) if layer.fp8 else (plain, GROUPED_REACHED)
    moved = round((matrices + values) * layer.itemsize)
    product = 2 * LAUNCH_S + ASSUMED.kernel_seconds(6 * rows * layer.dim * layer.width, dtype, moved, reached=reached)
    shared = ASSUMED.kernel_seconds(6 * layer.tokens * layer.dim * layer.shared, plain, 0)
    one_way = rows * layer.room * layer.dim
    there, back = (_exchange(layer, one_way * size) for size in (1 if layer.fp8 else layer.itemsize, layer.itemsize))
    forward = _overlapped(chunks, there, product, back, shared)
    backward = _overlapped(chunks, there, (2 + layer.recomputed) * product, back, 2 * shared)
    return forward + backward + ASSUMED.moving_seconds((chunks - 1) * 3 * matrices * layer.itemsize)


def _exchange(layer: Layer, nbytes: float) -> float:
    return collective_seconds(ASSUMED, "all_to_all", round(nbytes), range(layer.ranks))


def _overlapped(chunks: int, there: float, product: float, back: float, shared: float) -> float:
    """Seconds until the last part is back, and ``shared`` computed, which needs no exchange."""
    link, busy, done = chunks * there, shared, []
    for part in range(chunks):
        busy = max(busy, (part + 1) * there) + product
        done.append(busy)
    for ready in done:
        link = max(link, ready) + back
    return max(link, busy)

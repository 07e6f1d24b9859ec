"""What a norm costs on a GPU by each of the ways to run it: bytes moved, over the bandwidth that each way reaches.

The figures are measured on an H200 (`stepgraph bench norm`); only their ratios matter on another card. Between the
measured widths they are interpolated in the logarithm of the width; beyond them the nearest holds.
"""

import itertools
import math
from dataclasses import dataclass

#: Bytes per second of a copy.
COPY = 4.25e12

#: Part of the copy bandwidth that is reached, by width of the row: (N, forward, backward), for rows that fill the card.
REACHED = {
    "kernel": ((128, 0.89, 0.89), (256, 0.80, 0.64), (1024, 0.90, 0.87), (4096, 0.92, 0.92), (8192, 0.92, 0.92),
               (16384, 0.92, 0.90)),
    "inductor": ((128, 0.75, 0.20), (256, 0.75, 0.18), (4096, 0.85, 0.60), (8192, 0.85, 0.64), (16384, 0.80, 0.50)),
    "eager": ((128, 0.40, 0.15), (1024, 0.55, 0.25), (4096, 0.60, 0.35), (16384, 0.60, 0.35)),
}  # fmt: skip

#: Seconds that each launch costs besides its traffic, also inside a CUDA graph: starting and draining the card.
LAUNCH = {"kernel": 2.5e-6, "inductor": 2.5e-6, "eager": 2.5e-6}


@dataclass(frozen=True)
class Traffic:
    """What one norm moves. ``rows``, ``width``: M and N. ``forward``, ``backward``: bytes of the least traffic, with
    the residual add and the residual gradient in the same pass. ``apart``: further bytes where those sums are kernels
    of their own. ``neighbours``: bytes that only a compiler saves, by taking in pointwise operators beside."""

    rows: int
    width: int
    forward: int
    backward: int
    apart: int
    neighbours: int


def cost(choice: str, traffic: Traffic) -> float:
    """Seconds of the norm, forward and backward, by ``kernel``, ``inductor`` or ``eager``."""
    forward, backward = _reached(choice, traffic.width)
    seconds = (traffic.forward / forward + traffic.backward / backward) / COPY
    seconds += (1 + (traffic.backward > 0)) * LAUNCH[choice]
    if choice != "inductor":
        seconds += traffic.neighbours / COPY
    if choice == "eager":
        seconds += traffic.apart / COPY + 2 * LAUNCH[choice]
    return seconds


def _reached(choice: str, width: int) -> tuple[float, float]:
    table = REACHED[choice]
    if width <= table[0][0]:
        return table[0][1:]
    for (low, *a), (high, *b) in itertools.pairwise(table):
        if width <= high:
            part = math.log(width / low) / math.log(high / low)
            return tuple(x + part * (y - x) for x, y in zip(a, b, strict=True))
    return table[-1][1:]

"""The cost of a norm on a GPU for each way to run it: bytes moved over the bandwidth reached.

The shares are measured on an H200 (`stepgraph bench norm`) for RMS norms alone; only their ratios matter on
another GPU. Between the measured widths they are interpolated in the logarithm of the width; beyond them the nearest
measured width holds.
"""

from dataclasses import dataclass

from stepgraph.costs.hardware import ASSUMED, LAUNCH_S, MEMORY_REACHED, interpolated

#: Bytes per second of a copy.
_COPY = MEMORY_REACHED * ASSUMED.bandwidth

#: Share of a copy's bandwidth that is reached, by width of the row: (N, forward, backward), for rows that fill the GPU.
#: Kernel and eager: `benchmarks/h200_rms_norm.json`. Inductor: torch 2.11's defaults, measured in the same way; its
#: backward varies with the number of rows (0.44 to 0.77 at 4096). From 16384 columns on their sums fit no program's
#: registers: dx and dw are kernels of their own, with our rules too (`benchmarks/h200_compiled_squares.json`).
_SHARES = {
    "kernel": ((64, 0.91, 0.93), (384, 0.86, 0.87), (768, 0.95, 0.89), (1024, 0.96, 0.90), (2048, 0.98, 0.96),
               (16384, 0.98, 0.96), (131072, 0.90, 0.95)),
    "inductor": ((128, 0.91, 0.57), (512, 0.90, 0.72), (1024, 0.91, 0.62), (4096, 0.86, 0.70), (8192, 0.97, 0.50),
                 (16384, 0.98, 0.58), (65536, 0.69, 0.42)),
    "eager": ((64, 0.10, 0.12), (128, 0.20, 0.22), (256, 0.36, 0.32), (512, 0.58, 0.17), (1024, 0.75, 0.28),
              (4096, 0.84, 0.42), (16384, 0.60, 0.36)),
}  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """What one norm moves. ``width``: elements of a row. ``forward``, ``backward``: bytes of the least traffic, with
    the residual add and the residual gradient in the same kernel. ``apart``: further bytes where those sums are kernels
    of their own. ``neighbours``: bytes that only a compiler saves, by fusing neighbouring pointwise operators."""

    width: int
    forward: int
    backward: int
    apart: int
    neighbours: int


def cost(choice: str, traffic: Traffic) -> float:
    """Seconds of the norm, forward and backward, by ``kernel``, ``inductor`` or ``eager``."""
    forward, backward = _shares(choice, traffic.width)
    seconds = (traffic.forward / forward + traffic.backward / backward) / _COPY
    seconds += (1 + (traffic.backward > 0)) * LAUNCH_S
    if choice != "inductor":
        seconds += traffic.neighbours / _COPY
    if choice == "eager":
        seconds += traffic.apart / _COPY + 2 * LAUNCH_S
    return seconds


def _shares(choice: str, width: int) -> tuple[float, float]:
    table = _SHARES[choice]
    forward, backward = ({row[0]: row[i] for row in table} for i in (1, 2))
    return interpolated(forward, width), interpolated(backward, width)

"""Kernel configurations, and an estimate of which ones fit into registers and shared memory."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Registers of a processor.
REGISTERS = 65536
#: Bytes of shared memory left to the L1 cache if programs exchange: with less, steps took twice as long.
CACHE = 64 * 1024


@dataclass(frozen=True)
class Config:
    """How a kernel covers its rows. ``rows``, ``block``, ``warps`` are powers of two."""

    rows: int
    """Rows of a step of a program."""
    block: int
    """Columns of a tile; a program holds ``ceil(ceil(N / split) / block)`` tiles of each row."""
    warps: int
    """Warps of a program."""
    stages: int
    """Depth of the software pipeline of loads; 1: none, loads go straight to registers."""
    programs: int
    """Programs per processor, each striding over the steps; 0: one program per step."""
    split: int = 1
    """Programs that share a row."""
    hold_weight: bool = True
    """Keep the weight in 16 bits and convert it at each use: fewer registers, more instructions."""
    weight: str = "before"
    """When forward loads the weight: "before" all rows, "with" each step's, or "after" their sums."""
    exchange: str = "wait"
    """How programs that share rows get each other's sums: they "wait" for them, or, forward, a "launch" ahead finds
    them (see `wide`). ``programs`` then only bounds the registers: there is a program for each slice of each step."""

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps

    def pieces(self, n: int) -> int:
        """Tiles of a row that one program holds."""
        return math.ceil(math.ceil(n / self.split) / self.block)

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for each other: then all must run at once."""
        return self.split > 1 and self.exchange == "wait"

    @property
    def registers(self) -> int | None:
        """Most registers a thread may use if ``programs`` are to run on a processor at once; None where it is open."""
        return min(255, REGISTERS // (self.threads * self.programs) // 8 * 8) if self.programs else None


class Problem(NamedTuple):
    """What the choice of a configuration depends on. Sizes in bytes per element."""

    backward: bool
    M: int
    N: int
    heads: int
    loads: tuple[int, ...]
    """Item sizes of the (M, N) tensors read: x (residual), or dy, h (dh)."""
    stores: tuple[int, ...]
    """Item sizes of the (M, N) tensors written."""
    layer: bool
    weights: int
    """Vectors of length N read: weight, bias."""
    sums: int
    """Gradients summed over rows: 0, 1 or 2."""
    weight_size: int
    """Bytes per element of the weights."""
    shift: int = 1
    """Elements of 16 bytes where rows begin anywhere within them and are read from their beginning (see `rows`)."""

    @property
    def period(self) -> int:
        """Every how many rows one begins at the same place within ``shift`` elements."""
        return self.shift // math.gcd(self.N, self.shift)

    @property
    def span(self) -> int:
        """Columns of a row, and the most that are read before it."""
        return self.N + self.shift - math.gcd(self.N, self.shift)

    @property
    def sets(self) -> int:
        """Sets of rows that no program mixes: heads, or places within 16 bytes."""
        return max(self.heads, self.period)


class Hardware(NamedTuple):
    """The limits of one GPU."""

    processors: int
    shared: int
    """Bytes of shared memory that programs on one processor can use together."""
    dependent: bool = True
    """Whether a kernel may begin before the one ahead of it ends: compute capability 9.0 and more."""


@functools.cache
def hardware(index: int) -> Hardware:
    """Limits of CUDA device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_multiprocessor - 4096
    return Hardware(properties.multi_processor_count, shared, properties.major >= 9)


def vector(problem: Problem) -> int:
    """Elements of 16 bytes of the widest tensor read: neighbouring columns of one thread."""
    return 16 // max(problem.loads)


def head_block(problem: Problem, config: Config) -> int:
    """Heads of a step of a program."""
    return min(config.rows, 1 << (problem.heads - 1).bit_length())


def elements_of_thread(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows, and columns of each, that a thread holds."""
    # Fewer than a vector where a tile has fewer vectors than the program has threads.
    vec = max(1, min(vector(problem), config.rows * config.block // config.threads))
    per_row = max(1, config.threads * vec // config.block)
    columns = max(vec, config.block // config.threads) * config.pieces(problem.span)
    return max(1, config.rows // per_row), columns


def register_estimate(problem: Problem, config: Config) -> float:
    """Registers per thread, about."""
    rows_in_thread, columns = elements_of_thread(problem, config)
    elements, at_once = rows_in_thread * columns, math.gcd(problem.N, problem.shift)
    if problem.heads > 1:
        columns = elements
    held = elements * sum(size / 4 for size in problem.loads[: 2 if problem.backward else 1])
    if problem.shift == 1 and problem.N % vector(problem):
        # Unaligned rows are loaded element by element: an address for each, and nothing packed.
        held = elements * (5.0 if problem.backward else 3.6)
    if problem.layer and not problem.backward and len(problem.loads) > 1:
        held += 0.85 * elements  # the sum with the residual stays in float32 for the variance
    if config.weight == "after":
        # What ptxas can make do with; given more, it takes more.
        shared = 6 + 10 * (len(problem.loads) - 1) + 2 * (problem.shift > 1) if config.split > 1 else 0
        if problem.layer and problem.shift > 1 and config.split > 1 and config.exchange == "wait":
            shared += 20 + elements * (0.1 + 1.6 / at_once)  # row results are exchanged for `at_once` rows at a time
        return 22 + held + (6 if problem.layer else 0) + 0.5 * config.pieces(problem.span) + shared
    weights = columns * problem.weights * (problem.weight_size / 4)
    sums = columns * problem.sums
    along = 1.5 * rows_in_thread * vector(problem)
    pointers = 4.0 * rows_in_thread * (len(problem.loads) + len(problem.stores))
    if config.split > 16 or (config.split > 1 and len(problem.loads) > 2):
        # The shares of all parts at once, or the rows of a third tensor.
        pointers += 24.0 if problem.shift == 1 else 10.0
    extra = (24 if problem.layer else 0) + 0.5 * config.pieces(problem.span)
    if config.split > 1:
        # Backward holds the tile of the step before, too.
        extra += 8 + held if problem.backward else 20
    if problem.shift > 1 and problem.backward:
        # The ends of rows are handled separately.
        whole = config.split == 1
        extra += elements * ((1.15 if whole else 0.3 + 0.1 / at_once) if problem.layer else 1.9 if whole else 1.3)
    every = 18 + pointers + held + weights + sums + along + extra
    # Products of a single tile are summed as they are made.
    return 0.8 * every if problem.backward and config.split > 1 and config.pieces(problem.span) == 1 else every


def shared_estimate(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a program."""
    tile = config.rows * config.block * config.pieces(problem.span)
    return (config.stages - 1) * tile * sum(problem.loads) + 1024 * config.warps // 4


def runs(problem: Problem, config: Config, hw: Hardware) -> bool:
    """Whether programs that share a row can all run at once, and their tiles fit shared memory."""
    if config.cooperative and config.split * problem.period > hw.processors * max(1, config.programs):
        return False
    shared = hw.shared - (CACHE if config.split > 1 else 0)
    return shared_estimate(problem, config) * max(1, config.programs) <= shared


def fits(problem: Problem, config: Config, hw: Hardware) -> bool:
    """Whether, by the estimate, a configuration runs and spills no registers."""
    if not runs(problem, config, hw):
        return False
    if math.prod(elements_of_thread(problem, config)) > (64 if problem.backward else 72):
        return False
    if problem.shift > 1 and config.rows > max(1, config.threads * vector(problem) // config.block):
        return False  # the weight, which lies elsewhere within 16 bytes, is then laid out in another way than the rows
    most = min(config.registers or 255, REGISTERS // config.threads)
    return register_estimate(problem, config) <= most

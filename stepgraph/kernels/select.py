"""Which configuration a kernel runs with: a small model of the hardware, over every configuration that fits.

What makes a norm fast is bytes in flight. A processor moves its share of the memory bandwidth only while about 40 KB of
its loads are under way; what it does between two loads (wait, reduce over the row, exchange between programs) must be
short beside the time its tiles take to arrive; and the tail (sums over rows) must be short beside the whole. Registers
and shared memory bound how many rows a program may hold. `estimate` says this in nanoseconds, `candidates` lists what
fits, `select` takes the least. Nothing here knows a shape by name; constants were fitted on one H200.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


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
    finish: str = "tree"
    """How sums over rows are added up: "tree", "grid" or "launch" (see `partials`); unused forward."""
    hold_weight: bool = True
    """Keep the weight in its 16-bit form, converted at each use: fewer registers, more instructions."""

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps

    def pieces(self, n: int) -> int:
        """Tiles of a row that one program holds."""
        return math.ceil(math.ceil(n / self.split) / self.block)

    def late(self, problem: "Problem") -> bool:
        """Whether forward loads the weight after the row's sum, instead of holding it: one use of long rows."""
        return self.programs == 0 and problem.heads == 1 and elements_of_thread(problem, self)[1] >= 32

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for each other, so that all must run at once."""
        return self.split > 1 or self.finish == "grid"

    @property
    def registers(self) -> int | None:
        """Most registers a thread may use if ``programs`` are to run on a processor at once; None where it is open."""
        return min(255, REGISTERS // (self.threads * self.programs) // 8 * 8) if self.programs else None


class Problem(NamedTuple):
    """What the model must know of a call. Sizes in bytes per element."""

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
    quantized: bool = False


class Hardware(NamedTuple):
    """The limits of one GPU."""

    processors: int
    shared: int
    """Bytes of shared memory that programs on one processor can use together."""


REGISTERS = 65536
#: Bytes per nanosecond that one processor moves while all do, and the most it moves alone.
RATE, RATE_ALONE = 32.2, 70.0
#: Nanoseconds: launch and ramp; a load from memory; what a step costs besides its bytes; an exchange between programs.
LAUNCH, LATENCY, STEP, EXCHANGE, WAIT = 2500.0, 1100.0, 350.0, 1500.0, 500.0
#: Bytes of shared memory left to the first-level cache where programs exchange: with less, steps took twice as long.
CACHE = 64 * 1024
#: Nanoseconds per element of a tile that a processor computes on.
COMPUTE_FORWARD, COMPUTE_BACKWARD = 0.04, 0.065


@functools.cache
def hardware(index: int) -> Hardware:
    """Limits of CUDA device ``index``."""
    properties = torch.cuda.get_device_properties(index)
    return Hardware(properties.multi_processor_count, properties.shared_memory_per_multiprocessor - 4096)


def vector(problem: Problem) -> int:
    """Elements of 16 bytes of the widest tensor read: neighbouring columns of one thread."""
    return 16 // max(problem.loads)


def head_block(problem: Problem, config: Config) -> int:
    """Heads of a step of a program."""
    return min(config.rows, 1 << (problem.heads - 1).bit_length())


def elements_of_thread(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows, and columns of each, that a thread holds."""
    vec = vector(problem)
    per_row = max(1, config.threads * vec // config.block)
    columns = max(vec, config.block // config.threads) * config.pieces(problem.N)
    return max(1, config.rows // per_row), columns


def register_estimate(problem: Problem, config: Config) -> float:
    """Registers per thread, about."""
    rows_in_thread, columns = elements_of_thread(problem, config)
    elements = rows_in_thread * columns
    if problem.heads > 1:
        columns = elements
    held = elements * sum(size / 4 for size in problem.loads[: 2 if problem.backward else 1])
    if problem.N % vector(problem):
        # Rows that start anywhere are loaded element by element: an address for each, and nothing packed.
        held = elements * 3.6
    weights = columns * problem.weights * (problem.weight_size / 4)
    sums = columns * problem.sums
    along = 1.5 * rows_in_thread * vector(problem)
    pointers = 4.0 * rows_in_thread * (len(problem.loads) + len(problem.stores))
    if config.split > 16 or (config.split > 1 and len(problem.loads) > 2):
        pointers += 24.0  # the shares of all parts at once, or the rows of a third tensor
    extra = (14 if problem.layer else 0) + (8 if problem.quantized else 0) + 0.5 * config.pieces(problem.N)
    if config.split > 1:
        # Backward holds the tile of the step before, too.
        extra += 8 + held if problem.backward else 20
    return 18 + pointers + held + weights + sums + along + extra


def shared_estimate(problem: Problem, config: Config) -> int:
    """Bytes of shared memory of a program."""
    tile = config.rows * config.block * config.pieces(problem.N)
    return (config.stages - 1) * tile * sum(problem.loads) + 1024 * config.warps // 4


def _finish(problem: Problem, config: Config, programs: int) -> float:
    """Nanoseconds of adding up what ``programs`` programs summed."""
    if not problem.sums or programs == 1:
        return 0.0
    slot = 4 * problem.sums * problem.N * problem.heads
    if config.finish == "tree":
        levels = math.ceil(math.log(programs, 16))
        share = slot / config.split / max(1, problem.heads // head_block(problem, config))
        return levels * 2200 + share * (min(programs, 16) * levels) / 60
    together = programs * slot / 2500 + 700 * math.ceil(programs / 256)
    return together + (2600 if config.finish == "grid" else 3600)


def estimate(problem: Problem, config: Config, hw: Hardware) -> float:
    """Nanoseconds of a call, about."""
    heads = head_block(problem, config)
    blocks = math.ceil(problem.M / problem.heads / (config.rows // heads)) * math.ceil(problem.heads / heads)
    tile = config.rows * config.block * config.pieces(problem.N)
    used = tile * min(1.0, problem.N / (config.block * config.pieces(problem.N) * config.split))
    load, store = used * sum(problem.loads), used * sum(problem.stores)
    compute = tile * (COMPUTE_BACKWARD if problem.backward else COMPUTE_FORWARD)
    if config.programs:
        resident = config.programs
    else:
        by_registers = REGISTERS / (config.threads * register_estimate(problem, config))
        resident = max(1, int(min(by_registers, 2048 / config.threads, 24)))
    slots = hw.processors * resident // config.split
    running = min(blocks, slots) * config.split
    on_one = math.ceil(running / hw.processors)
    rounds = math.ceil(blocks / slots)
    rate = min(RATE_ALONE, RATE * hw.processors / min(running, hw.processors))
    exchange = EXCHANGE + 8 * config.split if config.split > 1 else 0.0
    serial = STEP + compute * max(1.0, 8 / config.warps) + (0.0 if problem.backward else exchange)
    if config.stages > 1:
        ahead = LATENCY / (config.stages - 1)
        step = max(on_one * (load + store) / rate, on_one * compute, serial + ahead * 0.5, exchange)
        if config.split > 1:
            # The exchange is not hidden: who shares a row waits for the slowest, least where programs take turns.
            step += WAIT * (1.2 if config.programs != 2 else 0.8) + 3 * config.split + 60 * config.pieces(problem.N)
        elif problem.backward and config.block > 32 * vector(problem):
            # Each row's sum goes through shared memory, and all warps wait for it.
            step *= 1 + 0.001 * config.rows * config.warps
        if problem.backward and config.split * config.programs == 1 and elements_of_thread(problem, config)[0] >= 4:
            # Many short reductions one after another; a second program on the processor fills the gaps.
            step *= 1.12
        # Backward finishes a tile that others have shares of one step later.
        total = LATENCY + (rounds + (problem.backward and config.split > 1)) * step
    else:
        # Programs take turns: one loads while another computes and stores; a program alone does neither at once.
        alone = LATENCY + serial + (load + store) / rate
        step = max(on_one * (load + store) / rate, on_one * compute, alone / (1.0 if rounds == 1 else 1.3))
        total = rounds * step
    return LAUNCH + total + _finish(problem, config, running // config.split // math.ceil(problem.heads / heads))


def fits(problem: Problem, config: Config) -> bool:
    """Whether a configuration can run without spilling registers, by the estimate."""
    most = config.registers or 255
    if math.prod(elements_of_thread(problem, config)) > 64:
        return False
    return register_estimate(problem, config) <= min(most, REGISTERS // config.threads)


def _splits(problem: Problem) -> list[int]:
    """Numbers of programs that may share a row: few for long slices, many where there are few rows."""
    if problem.heads > 1 or problem.N <= 4096:
        return [1]
    slices = (32768, 16384, 12288, 8192, 6144, 4096, 2048)
    return sorted({-(-problem.N // size) for size in slices if size >= problem.N // 256})


def candidates(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Every configuration worth a look whose tiles fit shared memory."""
    vec = vector(problem)
    sums = problem.backward and problem.sums > 0
    for split, warps in itertools.product(_splits(problem), (2, 4, 8, 16)):
        part = -(-problem.N // split)
        threads = 32 * warps
        # The widest tiles that all threads fill, and narrower ones where those waste less at the end of a row.
        widest = max(2, min(threads * vec, 1 << (part - 1).bit_length()))  # `hold` takes 16-bit values in pairs
        blocks = [widest >> shift for shift in range(4) if widest >> shift >= min(widest, 32)]
        padded = {block: -(-part // block) * block for block in blocks}
        blocks = [block for block in blocks if not any(padded[b] <= padded[block] for b in blocks if b > block)]
        for block, factor in itertools.product(blocks, (1, 2, 4)):
            rows = max(1, threads * vec // block) * factor
            loops = ((3, p) for p in (1, 2, 4, 8) if 8 <= p * warps <= 32)
            for stages, programs in (*loops, *(() if problem.backward or split > 1 else ((1, 0),))):
                for finish in ("tree", "grid", "launch") if sums else ("tree",):
                    config = Config(rows, block, warps, stages, programs, split, finish, not sums or split > 1)
                    shared = hw.shared - (CACHE if split > 1 else 0)
                    if shared_estimate(problem, config) * (programs or 1) <= shared and split <= hw.processors:
                        yield config


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, hw: Hardware, alone: bool) -> Config:
    # Among equals, the simpler one: no waiting between programs, fewer programs, smaller steps.
    def cost(config: Config) -> tuple:
        return (estimate(problem, config, hw), config.split, config.finish != "tree", config.programs, config.rows)

    def allowed(config: Config) -> bool:
        return alone or (config.split == 1 and config.finish == "tree")

    every = [config for config in candidates(problem, hw) if allowed(config)]
    found = [config for config in every if fits(problem, config)]
    if found:
        return min(found, key=cost)
    # Weights per head of very long rows: nothing fits; what spills least is still right.
    return min(every, key=lambda config: (register_estimate(problem, config), config.rows))


def select(problem: Problem, hw: Hardware, *, alone: bool = True) -> Config:
    """The configuration of a call: fixed by its shape and dtypes, so that results repeat bit for bit.

    Not ``alone``, for a launch over two tensors: no program waits for another.
    """
    # Numbers of rows are rounded to three bits: a serving batch of any size finds its configuration in the cache.
    shift = max(0, problem.M.bit_length() - 3)
    return _select(problem._replace(M=-(-problem.M >> shift) << shift), hw, alone)

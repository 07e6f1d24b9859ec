"""Which configuration a kernel runs with: what a thread and a processor should hold, and what then fits.

Memory reaches its full bandwidth only if every processor has some 64 KiB of loads in flight, in tiles neither so small
that a step only waits nor so large that registers spill. On an H200 that gave a few rules for all row lengths (measured
from 64 to 131,072 columns and from 1 to 2 million rows; see `benchmarks/`):

forward     a thread holds 32 bytes of a row, and rows until it holds 32 bytes, fewer where the call is so short that
            all programs run at once; each program does one step. A layer norm, whose programs meet twice, holds 64
            bytes in at most 8 warps. Rows of up to 128 KiB stay whole, the longest in 32 warps with their weight
            loaded after the sum; if there are too few rows to occupy all processors, programs share them.
backward    programs of ``w`` warps, ``8 / w`` on a processor, each with two steps of loads ahead. A row is spread over
            as many threads as in forward; a thread holds up to 64 bytes of each tensor. A single step is not
            pipelined.
long rows   that no program can hold, or that are many in backward, are shared by programs with a slice each (see
            `wide`).
sums        over rows are finished by a second, small launch; in long calls by the kernel itself, where the 2
            microseconds of a cooperative launch, which programs that wait for each other need, do not matter (see
            `partials`).

If a rule's configuration does not fit, smaller steps are tried, then more warps, then more programs per row. No rule is
for one particular shape.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """Keep the weight in 16 bits and convert it at each use: fewer registers, more instructions."""
    weight: str = "before"
    """When forward loads the weight: "before" all rows, "with" each step's, or "after" their sums."""

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
        return self.split > 1 or self.finish == "grid"

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
    quantized: bool = False
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


#: Registers of a processor.
REGISTERS = 65536
#: Bytes of shared memory left to the L1 cache if programs exchange: with less, steps took twice as long.
CACHE = 64 * 1024
#: Bytes of a tensor that a thread should hold.
HOLD_FORWARD, HOLD_LAYER, HOLD_BACKWARD = 32, 64, 64
#: Warps of a processor in backward: programs times warps of a program.
WARPS_BACKWARD = 8
#: Bytes read and written above which backward finishes its sums in the kernel.
LONG_CALL = 2**30
#: Bytes of the shortest slice of a row that is shared to occupy all processors.
LEAST_SLICE = 16 * 1024
#: Warps that a processor runs at once in forward, by their registers.
WARPS_FORWARD = 32
#: Steps of a program above which sharing rows pays, where one program could hold a row.
MANY_STEPS = 16
#: Bytes of the longest row that one program holds.
LONGEST_FORWARD, LONGEST_BACKWARD = 128 * 1024, 32 * 1024


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
    columns = max(vec, config.block // config.threads) * config.pieces(problem.span)
    return max(1, config.rows // per_row), columns


def register_estimate(problem: Problem, config: Config) -> float:
    """Registers per thread, about."""
    rows_in_thread, columns = elements_of_thread(problem, config)
    elements = rows_in_thread * columns
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
        shared = 6 + 10 * (len(problem.loads) - 1) if config.split > 1 else 0
        return 22 + held + (6 if problem.layer else 0) + 0.5 * config.pieces(problem.span) + shared
    weights = columns * problem.weights * (problem.weight_size / 4)
    sums = columns * problem.sums
    along = 1.5 * rows_in_thread * vector(problem)
    pointers = 4.0 * rows_in_thread * (len(problem.loads) + len(problem.stores))
    if config.split > 16 or (config.split > 1 and len(problem.loads) > 2):
        pointers += 24.0  # the shares of all parts at once, or the rows of a third tensor
    extra = (24 if problem.layer else 0) + (8 if problem.quantized else 0) + 0.5 * config.pieces(problem.span)
    if config.split > 1:
        # Backward holds the tile of the step before, too.
        extra += 8 + held if problem.backward else 20
    return 18 + pointers + held + weights + sums + along + extra


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
    if math.prod(elements_of_thread(problem, config)) > 64:
        return False
    if problem.shift > 1 and config.rows > max(1, config.threads * vector(problem) // config.block):
        return False  # the weight, which lies elsewhere within 16 bytes, is then laid out in another way than the rows
    most = min(config.registers or 255, REGISTERS // config.threads)
    return register_estimate(problem, config) <= most


def _floor(x: float) -> int:
    """The power of two at or below ``x``, at least 1."""
    return 1 << (max(1, int(x)).bit_length() - 1)


def _block(n: int, widest: int, padding: float) -> int:
    """Columns of a tile for slices of ``n``: wide tiles, and at most ``padding * n`` past the end of a row.

    Some padding costs less than narrower tiles do, except for rows shorter than a warp's load: there narrow tiles are
    free.
    """
    widest = max(2, min(widest, 1 << (n - 1).bit_length()))
    blocks = [widest >> shift for shift in range(4) if widest >> shift >= min(widest, 32)]
    padded = {block: -(-n // block) * block for block in blocks}
    allowed = n if n < 256 else n * (1 + padding)
    return next((block for block in blocks if padded[block] <= allowed), min(blocks, key=lambda b: (padded[b], -b)))


def _rows(problem: Problem, warps: int, part: int, most: float, hw: Hardware, programs: int) -> tuple[int, int]:
    """Rows and columns of a tile of slices of ``part`` columns, a thread holding at most ``most`` elements."""
    threads = 32 * warps
    # For long rows, padding costs more than narrow tiles; for the longest, less than sharing the row.
    bytes_of_part = part * max(problem.loads)
    padding = 1 / 3 if problem.backward else 1 / 8 if 24 * 1024 < bytes_of_part <= 32 * 1024 else 1 / 4
    block = _block(part, threads * vector(problem), padding)
    least = max(1, threads * vector(problem) // block)
    rows = max(least, _floor(most * threads / (-(-part // block) * block)))
    # Few rows: smaller steps, as long as there is a program for each.
    while rows > least and 2 * math.ceil(problem.M / rows) <= hw.processors * programs:
        rows //= 2
    return min(rows, 4096), block


def _warps(problem: Problem, least: int, most: int) -> int:
    """Warps such that each thread has 32 bytes of a row, or up to 53."""
    return max(least, min(most, _floor(1.2 * problem.N * max(problem.loads) / 1024)))


def _traffic(problem: Problem) -> int:
    """Bytes read and written."""
    return problem.M * problem.N * sum(problem.loads + problem.stores)


def _forward(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Forward configurations, the best first."""
    bytes_of_row = problem.span * max(problem.loads)
    shared = list(_forward_shared(problem, hw))
    if bytes_of_row <= LONGEST_FORWARD:
        # While other processors idle, an exchange takes less time than a whole row on one processor.
        if bytes_of_row > LONGEST_FORWARD // 2 and problem.M * -(-bytes_of_row // LEAST_SLICE) <= 2 * hw.processors:
            yield from shared
        yield from _forward_whole(problem, hw)
    yield from shared


def _forward_whole(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows held by one program."""
    size = max(problem.loads)
    held = (HOLD_LAYER if problem.layer else HOLD_FORWARD) // size
    most = 8 if problem.layer else 16 if problem.N * size <= 32 * 1024 else 32
    warps = _warps(problem, 2 if problem.layer else 4, most)
    while warps <= 32:
        # Up to, not including, twice what a thread should hold.
        rows, block = _rows(problem, warps, problem.span, 2 * held - 1, hw, WARPS_FORWARD // warps)
        one = warps
        while one > 8 and rows > 1:  # rather than rows side by side in many warps, a program for each
            one, rows = one // 2, rows // 2
        first = Config(rows, block, one, 1, 0)
        steps = problem.M / hw.processors
        if steps > 4 * MANY_STEPS and (rows, one, first.pieces(problem.span)) == (1, 8, 2) and not problem.layer:
            # A vector of each of two rows, rather than two of one row: 1% faster.
            yield Config(2, 2 * block, 16, 1, 0, weight=_weight(problem, first))
        while rows >= 1:
            config = replace(first, rows=rows)
            yield replace(config, weight=_weight(problem, config))
            rows //= 2
        warps *= 2


def _forward_shared(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows shared by programs of 16 warps: two on a processor, or one where they need more registers."""
    bytes_of_row = problem.span * max(problem.loads)
    slices = [64 * 1024 >> shift for shift in range(6 if problem.heads == 1 else 0)]
    # Few rows: smaller slices, as long as all programs run at once.
    while slices and slices[0] > LEAST_SLICE and problem.M * -(-bytes_of_row // slices[1]) <= 2 * hw.processors:
        slices.pop(0)
    for programs, part in itertools.product((2, 1), slices):
        split = -(-bytes_of_row // part)
        if split > 1:
            block = _block(-(-problem.span // split), 32 * 16 * vector(problem), 1 / 3)
            weight = "before" if problem.quantized else "after"
            yield Config(1, block, 16, 1, programs, split, weight=weight)


def _weight(problem: Problem, config: Config) -> str:
    """When a program that takes one step loads the weight.

    Held beside a long row, the weight takes registers that another program could use. Loaded with the row it saves 0.1
    us, which matters in the shortest calls; a large weight is better loaded before the row.
    """
    rows, columns = elements_of_thread(problem, config)
    if problem.heads > 1 or problem.quantized:
        return "before"
    together = "with" if max(problem.loads) == problem.weight_size == 2 else "before"  # see `rows.tied`
    if problem.layer:
        return "after" if problem.N * max(problem.loads) > 4096 else together
    registers = columns * (rows * max(problem.loads) + problem.weights * problem.weight_size) / 4
    if registers * config.threads > REGISTERS / 4:
        return "after"
    return together if columns < 32 else "before"


def _backward(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Backward configurations, the best first."""
    size = max(problem.loads)
    bytes_of_row = problem.span * size
    finish = "grid" if _traffic(problem) > LONG_CALL else "launch"
    shared = list(_backward_shared(problem, hw, finish))
    if shared and bytes_of_row > LONGEST_BACKWARD // 2:
        first = shared[0]
        steps = math.ceil(problem.M / first.rows) * first.split / (hw.processors * first.programs)
        if bytes_of_row > LONGEST_BACKWARD or steps >= MANY_STEPS:
            yield from shared
    warps = _warps_backward(problem)
    while warps <= 16:
        programs = max(1, WARPS_BACKWARD // warps)
        # A program alone on its processor has more loads in flight if it holds one and a half times as much.
        most = HOLD_BACKWARD / size * (1.5 if programs == 1 else 1)
        rows, block = _rows(problem, warps, problem.span, most, hw, programs)
        if problem.M <= 2 * rows * hw.processors * programs < 2 * problem.M:
            rows *= 2  # then one step does it
        while rows >= 1:
            once = _steps(problem, rows) <= hw.processors * programs
            yield Config(rows, block, warps, 1 if once else 3, programs, 1, finish, hold_weight=not problem.sums)
            rows //= 2
        warps *= 2
    yield from shared


def _warps_backward(problem: Problem) -> int:
    bytes_of_row = problem.span * max(problem.loads)
    if bytes_of_row < 512:
        return 8 if bytes_of_row <= 256 else 4
    if bytes_of_row <= 512 * WARPS_BACKWARD and problem.N & (problem.N - 1) == 0:
        return max(2, bytes_of_row // 512)  # one tile holds a row
    return _warps(problem, 2, WARPS_BACKWARD)


def _steps(problem: Problem, rows: int) -> int:
    """Steps of all programs together, a step being ``rows`` rows of the same heads."""
    heads = min(rows, 1 << (problem.heads - 1).bit_length())
    return math.ceil(problem.M / problem.heads / (rows // heads)) * math.ceil(problem.heads / heads)


def _backward_shared(problem: Problem, hw: Hardware, finish: str) -> Iterator[Config]:
    """Backward configurations in which programs share rows: slices of 2048 columns while those are 16 or fewer."""
    if problem.heads > 1:
        return
    bytes_of_row = problem.span * max(problem.loads)
    if problem.M * bytes_of_row <= 32 * 2**20:
        kinds = ((2048, 4, 2), (1024, 2, 1), (512, 2, 1))
    elif bytes_of_row <= 80 * 1024:
        kinds = ((2048, 2, 2), (2048, 2, 1), (1024, 2, 1), (512, 2, 1))
    elif bytes_of_row <= 160 * 1024:
        kinds = ((4096, 4, 2), (4096, 4, 1), (2048, 4, 1), (1024, 4, 1))
    else:
        kinds = ((6144, 4, 1), (4096, 4, 1), (2048, 4, 1), (1024, 4, 1))
    for part, warps, rows in kinds:
        split = -(-bytes_of_row // (2 * part))
        if split > 1:
            block = _block(-(-problem.span // split), 32 * warps * vector(problem), 1 / 3)
            yield Config(rows, block, warps, 3, WARPS_BACKWARD // warps, split, finish, hold_weight=True)


def preferences(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Configurations of a call, the best first."""
    return _backward(problem, hw) if problem.backward else _forward(problem, hw)


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, hw: Hardware, alone: bool) -> Config:
    tried = list(preferences(problem, hw))
    if not alone:
        tried = [replace(config, finish="tree") for config in tried if config.split == 1]
    for config in tried:
        if fits(problem, config, hw):
            return config
    # Nothing fits, on a small GPU or for long rows with per-head weights: what spills least is still correct.
    possible = [config for config in tried if runs(problem, config, hw) and config.pieces(problem.span) <= 64]
    if not possible and problem.heads > 1:
        raise ValueError(
            f"rows of {problem.N} with a weight for each of {problem.heads} heads do not fit a program, "
            "which holds some 12,000 elements; use one weight for all heads"
        )
    if not possible:
        raise ValueError(
            f"rows of {problem.N} are longer than {hw.processors} processors can share; split the last dimension"
        )
    return min(possible, key=lambda config: (register_estimate(problem, config), config.rows))


def select(problem: Problem, hw: Hardware, *, alone: bool = True) -> Config:
    """The configuration of a call: fixed by its shape and dtypes, so that results repeat bit for bit.

    Unless ``alone`` (a launch over two tensors is not), no program waits for another. Raises ValueError for rows too
    long for all processors together, or, with per-head weights, for one program.
    """
    return _select(problem._replace(M=_rounded(problem.M)), hw, alone)


def _rounded(rows: int) -> int:
    """Numbers of rows, rounded up to three bits: serving batches of any size find their configuration in the cache."""
    shift = max(0, rows.bit_length() - 3)
    return -(-rows >> shift) << shift

"""Which configuration a kernel runs with: what a thread and a processor should hold, and what then fits.

Memory reaches its full bandwidth only if every processor has some 64 KiB of loads in flight, in tiles neither so small
that a step only waits nor so large that registers spill. On an H200 that gave a few rules for all row lengths (measured
from 64 to 131,072 columns and from 1 to 2 million rows; see `benchmarks/`):

forward     a thread holds 32 bytes of a row, and rows until it holds 32 bytes, fewer where the call is so short that
            all programs run at once; each program does one step. A layer norm, whose programs meet twice, holds 64
            bytes in at most 8 warps, and so do rows that begin anywhere within 16 bytes (see `rows`), whose weight is
            loaded element by element. Rows of up to 144 KiB stay whole, the longest in 32 warps with their weight
            loaded after the sum; longer ones are shared by programs of 8 warps, four on a processor.
backward    few warps a program, so that its sums over a row meet in few places: one for rows of up to 2.75 KiB, two up
            to 3.5, four up to 12, eight up to 24. A program takes one row a step, or as many as make 3 KiB, with two or
            three steps of loads ahead; programs on a processor are as many as make some 64 KiB in flight. A single step
            is not pipelined. Of long rows a thread has one vector of a tile: wider tiles took more registers.
long rows   that no program can hold, or that are many in backward, are shared by programs with a slice each (see
            `wide`). Of rows that begin anywhere, slices are such that few programs have no work.
sums        over rows are finished by a second, small launch (see `partials`).

If a rule's configuration does not fit, smaller steps are tried, then more warps, then more programs per row. No rule is
for one particular shape.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from stepgraph.kernels.norm.triton.config.limits import REGISTERS, Config, Hardware, Problem, elements_of_thread, vector

#: Bytes of a tensor that a thread should hold.
HOLD_FORWARD, HOLD_LAYER, HOLD_BACKWARD = 32, 64, 64
#: Warps of a processor in backward: programs times warps of a program.
WARPS_BACKWARD = 8
#: Bytes of the shortest slice of a row that is shared to occupy all processors.
LEAST_SLICE = 16 * 1024
#: Bytes of a tensor up to which a forward takes a few microseconds, all its programs at once: padding costs nothing.
BRIEF = 3 * 2**19
#: Bytes of the shortest row whose sums a launch ahead finds, in brief calls, and of its slices.
LEAST_AHEAD, SLICE_AHEAD = 48 * 1024, 4 * 1024
#: Bytes of the longest row that, beginning anywhere within 16 bytes, lies in narrow tiles.
SHORT = 640
#: Warps that a processor runs at once in forward, by their registers.
WARPS_FORWARD = 32
#: Bytes of the longest row that one program holds.
LONGEST_FORWARD, LONGEST_BACKWARD = 144 * 1024, 24 * 1024


def _floor(x: float) -> int:
    """The power of two at or below ``x``, at least 1."""
    return 1 << (max(1, int(x)).bit_length() - 1)


def _block(n: int, widest: int, padding: float, least: int | None = None) -> int:
    """Columns of a tile for slices of ``n``: wide tiles, and at most ``padding * n`` past the end of a row. Those of
    ``least`` columns or more, or else the three below ``widest``.

    Some padding costs less than narrower tiles do, except for rows shorter than a warp's load: there narrow tiles are
    free.
    """
    widest = max(2, min(widest, 1 << (n - 1).bit_length()))
    shifts = range(4) if least is None else range(max(1, (widest // max(32, least)).bit_length()))
    blocks = [widest >> shift for shift in shifts if widest >> shift >= min(widest, 32)]
    padded = {block: -(-n // block) * block for block in blocks}
    allowed = n if n < 256 else n * (1 + padding)
    return next((block for block in blocks if padded[block] <= allowed), min(blocks, key=lambda b: (padded[b], -b)))


def _rows(problem: Problem, warps: int, part: int, most: float, hw: Hardware, programs: int) -> tuple[int, int]:
    """Rows and columns of a tile of slices of ``part`` columns, a thread holding at most ``most`` elements."""
    threads = 32 * warps
    # For long rows, padding costs more than narrow tiles; for the longest, less than sharing the row. Where processors
    # idle, it costs nothing.
    bytes_of_part = part * max(problem.loads)
    padding = 1 / 3 if problem.backward else 1 / 8 if 24 * 1024 < bytes_of_part <= 32 * 1024 else 1 / 4
    if not problem.backward and _few(problem, hw):
        padding = 1 / 2
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


def _few(problem: Problem, hw: Hardware) -> bool:
    """Whether every row has a processor to itself."""
    return hw.processors >= problem.M


def _bytes(problem: Problem) -> int:
    """Bytes of one tensor read."""
    return problem.M * problem.span * max(problem.loads)


def _traffic(problem: Problem) -> int:
    """Bytes read and written."""
    return problem.M * problem.N * sum(problem.loads + problem.stores)


def _forward(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Forward configurations, the best first."""
    bytes_of_row = problem.span * max(problem.loads)
    shared = list(_forward_shared(problem, hw))
    if _bytes(problem) <= BRIEF and bytes_of_row > LEAST_AHEAD and problem.heads == 1:
        split = -(-bytes_of_row // SLICE_AHEAD)
        warps = 8 if problem.M * split <= 2 * hw.processors else 4
        block = _block(-(-problem.span // split), 32 * warps * vector(problem), 1 / 3)
        yield Config(1, block, warps, 1, 4, split, weight="after", exchange="launch")
    if bytes_of_row <= LONGEST_FORWARD:
        # While other processors idle, an exchange takes less time than a whole row on one processor.
        if bytes_of_row > LONGEST_FORWARD // 2 and problem.M * -(-bytes_of_row // LEAST_SLICE) <= 2 * hw.processors:
            yield from shared
        yield from _forward_whole(problem, hw)
    yield from shared


def _forward_whole(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows held by one program."""
    size = max(problem.loads)
    long = problem.layer or problem.shift > 1  # threads of few warps that hold more
    if problem.heads == 1 and not problem.layer:
        brief = _forward_brief(problem, hw)
        if brief is not None:
            yield replace(brief, weight=_weight(problem, brief, hw))
    held = (HOLD_LAYER if long else HOLD_FORWARD) // size
    most = 8 if problem.layer else 16 if problem.N * size <= 32 * 1024 else 32
    warps = _warps(problem, 4 if not problem.layer else 1 if problem.N * size >= 1024 else 2, most)
    short = problem.shift > 1 and problem.span * size <= SHORT  # rows in narrow tiles, side by side
    if problem.shift > 1:
        warps = min(32, _floor(problem.span * size / (512 if _few(problem, hw) else 2048)))
        warps = (2 if _bytes(problem) <= 2 * BRIEF else 4) if short else warps
    while warps <= 32:
        # Up to, not including, twice what a thread should hold.
        rows, block = _rows(problem, warps, problem.span, held * 5 / 4 if long else 2 * held - 1, hw,
                            WARPS_FORWARD // warps)  # fmt: skip
        one = warps
        while one > 4 and rows > 1:  # rather than rows side by side in many warps, a program for each
            one, rows = one // 2, rows // 2
        if problem.shift > 1:
            full = 32 * one * vector(problem)
            block = _block(problem.span, 64 if short else 2 * full, 0.14, 32 if short else full // 2)
            block = 64 if short and problem.N >= 128 else block
            rows = min(_floor(held * 5 / 4 * 32 * one / problem.span) if short else rows, max(1, full // block))
            while short and rows * -(-problem.span // block) * block > 20 * 32 * one:
                one *= 2
        first = Config(rows, block, one, 1, 0)
        steps = problem.M / hw.processors
        if steps > 64 and (rows, one, first.pieces(problem.span)) == (1, 8, 2) and not long:
            # A vector of each of two rows, rather than two of one row: 1% faster.
            yield Config(2, 2 * block, 16, 1, 0, weight=_weight(problem, first, hw))
        while rows >= 1:
            config = replace(first, rows=rows)
            yield replace(config, weight=_weight(problem, config, hw))
            rows //= 2
        warps *= 2


def _forward_brief(problem: Problem, hw: Hardware) -> Config | None:
    """RMS norms of a few microseconds: each thread holds fewer elements, because all programs run at once anyway."""
    bytes_of_row = problem.span * max(problem.loads)
    block = 1 << (problem.span - 1).bit_length()
    few = _few(problem, hw)
    if problem.shift > 1 and 4096 < bytes_of_row <= 10 * 1024 and _bytes(problem) <= 4 * BRIEF:
        return Config(1, 1024, _floor(bytes_of_row / 512), 1, 0)
    if problem.shift == 1 and few and 32 * 1024 < bytes_of_row <= 44 * 1024:
        return Config(1, 4096, 32, 1, 0)
    if problem.shift == 1 and few and 4096 < bytes_of_row < 8192:
        return Config(1, 1024, 8, 1, 0)
    if not few and block <= 2048 and _bytes(problem) <= BRIEF:
        return Config(max(1, 1024 // block), block, 4, 1, 0)
    return None


def _forward_shared(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows shared by programs of 8 warps, as many on a processor as their registers allow."""
    bytes_of_row = problem.span * max(problem.loads)
    slices = [32 * 1024 >> shift for shift in range(6 if problem.heads == 1 else 0)]
    # Few rows: smaller slices, as long as all programs run at once.
    while slices and slices[0] > LEAST_SLICE and problem.M * -(-bytes_of_row // slices[1]) <= 4 * hw.processors:
        slices.pop(0)
    at_once = (2, 1) if problem.shift > 1 else (3, 2) if problem.layer else (4, 2)
    for programs, part in itertools.product(at_once, slices):
        split = -(-bytes_of_row // part)
        if split > 1:
            block = _block(-(-problem.span // split), 32 * 8 * vector(problem), 1 / 3)
            yield Config(1, block, 8, 1, programs, split, weight="after")


def _weight(problem: Problem, config: Config, hw: Hardware) -> str:
    """When a program that takes one step loads the weight.

    Held with a long row, the weight takes registers that another program could use. Loaded with the row it saves 0.1
    us, which matters in the shortest calls; a large weight is better loaded before the row, and where a processor has
    but one row so is any that fits.
    """
    rows, columns = elements_of_thread(problem, config)
    if problem.heads > 1:
        return "before"
    if problem.shift > 1:
        return "after"  # it lies elsewhere within 16 bytes, and is loaded element by element
    short = problem.N * max(problem.loads) < 16 * 1024
    together = "with" if max(problem.loads) == problem.weight_size == 2 and short else "before"  # see `rows.tied`
    if problem.layer:
        return "after" if problem.N * max(problem.loads) > 4096 and not (short and _few(problem, hw)) else together
    registers = columns * (rows * max(problem.loads) + problem.weights * problem.weight_size) / 4
    few = _few(problem, hw)
    if registers * config.threads > REGISTERS * (0.45 if few else 0.25):
        return "after"
    return together if columns < (16 if few else 32) else "before"


def _backward(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Backward configurations, the best first."""
    bytes_of_row = problem.span * max(problem.loads)
    shared = list(_backward_shared(problem, hw))
    if bytes_of_row > LONGEST_BACKWARD:
        yield from shared
    power = problem.N & (problem.N - 1) == 0 and bytes_of_row <= (2048 if problem.layer else 8192)
    if not power or (bytes_of_row <= 512 and _traffic(problem) > 64 * 2**20):
        yield from _backward_whole(problem, hw)
    yield from _backward_tile(problem, hw)
    yield from shared


def _backward_whole(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows held by programs of few warps."""
    size, vec = max(problem.loads), vector(problem)
    bytes_of_row = problem.span * size
    if bytes_of_row < 256 and problem.shift == 1:
        return
    warps = next((warps for warps, most in ((1, 2816), (2, 3600), (4, 12288), (8, 24576)) if bytes_of_row <= most), 16)
    rows = _floor(3200 / bytes_of_row)
    if warps == 1:
        programs, stages = 4, 4
    elif warps == 2 and 8 * hw.processors <= problem.M:
        programs, stages = 4, 3
    elif bytes_of_row <= 4224:
        # Of rows that begin anywhere a program takes as many as give each thread one vector of a tile: see `fits`.
        warps, rows, programs, stages = (2, 1, 4, 3) if problem.shift > 1 else (4, 2, 2, 3)
    elif warps == 4:
        programs, stages = (2, 4) if bytes_of_row <= 6144 else (2, 3) if bytes_of_row <= 9216 else (1, 4)
        if 8 * hw.processors > problem.M:  # few rows: fewer sums to add up
            programs, stages = 1, 4
    else:
        programs, stages = 1, 4 if bytes_of_row < 16 * 1024 and problem.shift == 1 else 3
    while warps <= 16:
        full = 32 * warps * vec
        padding = 1 / 7 if warps < 8 else 1 / 4
        widest = 2 * full // rows if bytes_of_row <= (9216 if problem.layer else 12288) else full
        block = _block(problem.span, widest, padding + 0.001, min(full // 2, full // rows))
        if problem.shift > 1:
            block = min(block, max(32, full // rows))
        for fewer in (rows, *(1 << k for k in reversed(range(rows.bit_length() - 1)))):
            once = _steps(problem, fewer) <= hw.processors * programs
            more = 2 if warps == 1 and fewer * bytes_of_row <= 1200 and _bytes(problem) > 2**24 else 1
            hold = problem.layer or not problem.sums
            config = Config(fewer, block, warps, 1 if once else stages, programs * more, hold_weight=hold)
            if fewer == 1 or (once and not problem.layer) or elements_of_thread(problem, config)[1] <= 32:
                yield config
        warps, programs, stages = warps * 2, max(1, programs // 2), 3


def _backward_tile(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Rows side by side in one tile of a program: as good where their length is a power of two."""
    size = max(problem.loads)
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
            yield Config(rows, block, warps, 1 if once else 3, programs, hold_weight=not problem.sums)
            rows //= 2
        warps *= 2


def _warps_backward(problem: Problem) -> int:
    bytes_of_row = problem.N * max(problem.loads)
    if bytes_of_row < 512:
        return 8 if bytes_of_row <= 256 else 4
    if bytes_of_row <= 512 * WARPS_BACKWARD and problem.N & (problem.N - 1) == 0:
        return max(2, bytes_of_row // 512)  # one tile holds a row
    return _warps(problem, 2, WARPS_BACKWARD)


def _steps(problem: Problem, rows: int) -> int:
    """Steps of all programs together, a step being ``rows`` rows of the same heads."""
    heads = min(rows, 1 << (problem.heads - 1).bit_length())
    return math.ceil(problem.M / problem.heads / (rows // heads)) * math.ceil(problem.heads / heads)


def _backward_shared(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Backward configurations in which programs share rows: slices of 2048 columns and more."""
    if problem.heads > 1:
        return
    bytes_of_row = problem.span * max(problem.loads)
    # Columns of a slice, in 16 bits; warps, rows, programs on a processor, steps of loads ahead and one.
    if problem.shift > 1:
        kinds = _well_spread(problem, bytes_of_row, hw)
    elif problem.M * bytes_of_row <= 32 * 2**20:
        kinds = [(2048, 4, 2, 2, 3), (1024, 2, 1, 4, 3), (512, 2, 1, 4, 3)]
    elif bytes_of_row > 160 * 1024:
        kinds = [(part, 4, 1, 2, 3) for part in (6144, 4096, 2048, 1024)]
    else:
        kinds = [(part, 2, 1, 4, 3) for part in (3072, 2048, 1024, 512)[problem.layer :]]
    for part, warps, rows, programs, stages in kinds:
        split = -(-bytes_of_row // (2 * part))
        if split > 1:
            widest = 32 * warps * vector(problem) * (2 if rows > 1 else 1)
            block = _block(-(-problem.span // split), widest, 1 / 3)
            yield Config(rows, block, warps, stages, programs, split, hold_weight=True)


def _well_spread(problem: Problem, bytes_of_row: int, hw: Hardware) -> list[tuple[int, int, int, int, int]]:
    """Slices of rows that begin anywhere. Programs come in groups of all slices of rows that begin at each place: those
    first that leave the fewest programs of a processor without work."""
    kinds = [(5120, 4, 1, 2, 3), (3072, 4, 1, 3, 3), (2048, 4, 1, 4, 3), (1024, 4, 1, 2, 3)]
    if problem.layer:
        kinds = [(3072, 4, 1, 2, 3), (2048, 2, 1, 4, 3), (1024, 2, 1, 4, 3)]

    def cost(kind: tuple[int, int, int, int, int]) -> float:
        """The share of programs without work, plus 0.05 for each wider kind."""
        group, programs = -(-bytes_of_row // (2 * kind[0])) * problem.period, hw.processors * kind[3]
        return programs % group / programs + 0.05 * kinds.index(kind)

    return sorted(kinds, key=cost)


def preferences(problem: Problem, hw: Hardware) -> Iterator[Config]:
    """Configurations of a call, the best first."""
    return _backward(problem, hw) if problem.backward else _forward(problem, hw)

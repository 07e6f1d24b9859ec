"""Plans: what a call of the CUDA backend needs besides its tensors, computed once for each layout of the inputs.

A plan holds the launches of a call with all their numbers and constants, and the sizes of scratch memory. Its key is
everything known without reading memory: norm, shapes, strides, dtypes, device.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.compat import empty_strided
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem, hardware, head_block, runs, vector
from stepgraph.kernels.norm.triton.config.rules import preferences
from stepgraph.kernels.norm.triton.launch import INTERPRETED, Launch
from stepgraph.kernels.norm.triton.partials import FANIN
from stepgraph.kernels.norm.triton.rows import rows_of

Tensor = torch.Tensor
Optional = Tensor | None

#: The GPU that the interpreter pretends to be: few processors, so that small shapes take every path.
INTERPRETED_HARDWARE = Hardware(4, 227 * 1024, dependent=False)

_MOST_PLANS = 8192


class Plans(dict):
    """Plans by key; all are dropped when there are too many."""

    def make(self, key: Any, build: Callable[..., Any], *arguments: Any) -> Any:
        """Build, remember and return the plan of ``key``."""
        if len(self) >= _MOST_PLANS:
            self.clear()
        self[key] = plan = build(*arguments)
        return plan


def hardware_of(x: Tensor) -> Hardware:
    """Limits of the device of ``x``."""
    return INTERPRETED_HARDWARE if INTERPRETED else hardware(x.device.index)


def layout(x: Optional) -> Any:
    """What a plan, and `spec.check`, depend on in a tensor."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


#: Size, stride and dtype of an output; None: the call has no such output.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None

_empty = empty_strided("cpu" if INTERPRETED else "cuda")


def form(shape: Sequence[int], dtype: torch.dtype, wanted: bool = True) -> Form:
    """The form of a contiguous output."""
    strides = (*itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1),)[::-1]
    return (tuple(shape), strides if shape else (), dtype) if wanted else None


def allocate(forms: Sequence[Form]) -> list[Optional]:
    """Memory for outputs, on the current device."""
    return [None if form is None else _empty(*form) for form in forms]


def scratch(words: int) -> Tensor:
    """Memory for ``words`` of 64 bits, with anything in them."""
    return _empty((words,), (1,), torch.int64)


def dense(weight: Optional) -> Optional:
    """A weight as kernels read it."""
    return weight if weight is None or weight.is_contiguous() else weight.contiguous()


def heads_of(weight: Optional) -> int:
    """Heads that have weights of their own."""
    return 1 if weight is None or weight.dim() == 1 else weight.shape[0]


class Place(NamedTuple):
    """Where the rows of one input lie, for a kernel."""

    numbers: tuple[int, int, int]
    align: int
    two_levels: bool
    copy: bool
    """Whether its rows do not fit two levels of strides: the call makes it contiguous first."""

    def constants(self, name: str) -> dict[str, Any]:
        """Compile-time constants of the input that kernels call ``name``."""
        return {f"{name}_ALIGN": self.align, f"{name}_TWO": self.two_levels}

    def ready(self, x: Optional) -> Optional:
        """``x`` as the kernel may read it."""
        return x.contiguous() if self.copy and x is not None else x


def place_of(x: Optional, heads: int) -> Place:
    """Where the rows of ``x`` (..., N) or (..., heads, N) lie."""
    if x is None:
        return Place((0, 0, 1), 1, False, False)
    rows = rows_of(x, heads)
    return Place((rows.outer, rows.inner, rows.size), rows.align, rows.two_levels, rows.tensor is not x)


def by_vectors(problem: Problem, hw: Hardware, places: Sequence[Place]) -> Problem:
    """``problem``, with rows that begin anywhere within 16 bytes read from their beginning, where all tensors (at
    ``places``) have consecutive rows. Not for rows of a few vectors, of which too much would be read,
    nor for those longer than programs can share so."""
    width = 16 // min(problem.loads)
    dense = all(not place.two_levels and place.numbers[0] * place.align == problem.N for place in places)
    if problem.heads > 1 or problem.N % width == 0 or 8 * width > problem.N or not dense:
        return problem
    shifted = problem._replace(shift=width)
    return shifted if any(runs(shifted, config, hw) for config in preferences(shifted, hw)) else problem


def copies(places: Sequence[Place], weights: Sequence[Optional]) -> bool:
    """Whether a call has to copy any of its inputs first: `Place.ready`, `dense`."""
    return any(place.copy for place in places) or any(not (w is None or w.is_contiguous()) for w in weights)


class Cover(NamedTuple):
    """How the programs of a launch cover the rows of one tensor."""

    grid: int
    slots: int
    """Programs that take the same columns of the same heads, each with a partial sum of them."""
    groups: int
    """Groups of programs that share rows."""
    heads: int
    """Heads of a step."""


def cover_of(problem: Problem, config: Config, hw: Hardware) -> Cover:
    """One program per step, or at most as many as ``config`` allows at once."""
    heads = head_block(problem, config)
    head_blocks = -(-problem.sets // heads)
    steps = -(-problem.M // problem.sets)
    slots = -(-steps // (config.rows // heads))
    if config.programs and config.exchange == "wait":
        slots = min(slots, max(1, hw.processors * config.programs // (config.split * head_blocks)))
    groups = slots * head_blocks
    return Cover(groups * config.split, groups if problem.period > 1 else slots, groups, heads)


def held(*tensors: Optional) -> bool:
    """Whether `rows.hold` pays: 16-bit values, on a GPU."""
    return not INTERPRETED and all(tensor is not None and tensor.element_size() == 2 for tensor in tensors)


def tiles(problem: Problem, config: Config) -> dict[str, Any]:
    """Compile-time constants that all kernels share."""
    return {
        "ROWS": config.rows,
        "BLOCK": config.block,
        "PIECES": config.pieces(problem.span),
        # Fewer rows than 2**31 are counted, multiplied and divided in 32 bits.
        "BIG": problem.M + config.rows * 4096 >= 2**31,
    }


def launches(
    kernel: Any, numbers: tuple[int | float, ...], constants: dict[str, Any], grid: int, config: Config,
    cooperative: bool, rounds: int = 1,
) -> tuple[Launch, ...]:  # fmt: skip
    """One launch; several under the interpreter, whose programs cannot exchange while they run.

    ``rounds``: exchanges in a step, each depending on the one before.
    """
    modes = (*["publish"] * rounds, "collect") if INTERPRETED and config.split > 1 else ("wait",)
    return tuple(
        Launch(
            kernel, numbers, constants | {"EXCHANGE": mode}, grid,
            warps=config.warps, registers=config.registers, cooperative=cooperative,
        )
        for mode in modes
    )  # fmt: skip


def launches_ahead(
    ahead: Any, kernel: Any, numbers: tuple[int | float, ...], constants: dict[str, Any], grid: int, config: Config,
    hw: Hardware,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Two launches, the first of which writes what the second collects: ``exchange="launch"``."""
    options = {"warps": config.warps, "registers": config.registers}
    needed = {name: value for name, value in constants.items() if name in ahead.arg_names}
    second = constants | {"EXCHANGE": "depend" if hw.dependent else "collect"}
    return (
        Launch(ahead, numbers, needed | {"DEPENDENT": hw.dependent}, grid, **options),
        Launch(kernel, numbers, second, grid, dependent=hw.dependent, **options),
    )


def share_words(problem: Problem, config: Config, cover: Cover, scaled: bool = False) -> int:
    """Words of memory through which the groups of a launch exchange: see `wide`. ``scaled``: rows' magnitudes too."""
    if config.split == 1:
        return 0
    kinds = 1 + problem.layer + scaled
    steps = problem.period * math.ceil(math.ceil(problem.M / problem.period) / config.rows)
    turns = math.ceil(steps / cover.slots) + 1 if INTERPRETED or config.exchange == "launch" else 4
    return cover.groups * turns * kinds * config.split * config.rows


def finish_of(problem: Problem, config: Config, cover: Cover) -> str:
    """``FINISH`` of a launch: see `partials`."""
    if cover.slots == 1 or not problem.sums:
        return "direct"
    if problem.period > 1 and config.split > 1 and config.finish == "tree":
        return "launch"  # parts of rows that begin elsewhere end elsewhere: a tree adds up one part's columns
    # Under the interpreter programs cannot wait for each other.
    return "launch" if INTERPRETED and config.finish == "grid" else config.finish


def counters_of(finish: str, cover: Cover) -> int:
    """Counters (int32) that a launch needs: see `partials.counters_of`."""
    if finish == "tree":
        return (cover.slots // 15 + 8) * cover.grid // cover.slots
    return 2 if finish == "grid" else 0


def pitch_of(problem: Problem) -> int:
    """Length of one plane of a slot: a multiple of 16 bytes."""
    return -(-problem.heads * problem.N // 4) * 4


def partials_of(problem: Problem, finish: str, cover: Cover) -> int:
    """Elements of all slots; a tree's upper levels add less than a fifteenth of the lowest, plus a few."""
    if finish == "direct":
        return 0
    return (cover.slots + (cover.slots // 15 + 8 if finish == "tree" else 0)) * problem.sums * pitch_of(problem)


def sum_tile(finish: str, config: Config, cover: Cover, slot: int) -> dict[str, int]:
    """Slots and columns added at once: about 32 registers of every thread. ``slot``: elements of one."""
    if finish == "tree":
        return {"SUM_ROWS": FANIN.value, "SUM_WIDTH": min(config.block, 2 * config.threads)}
    # Few columns per program while programs would idle; 8 columns are 32 bytes, the least that memory moves.
    width = min(32, max(8, 1 << (slot // cover.grid).bit_length()))
    return {"SUM_ROWS": min(1 << (cover.slots - 1).bit_length(), 32 * config.threads // width), "SUM_WIDTH": width}


def sum_rows(problem: Problem, config: Config, heads: int) -> int:
    """Rows of the accumulators: rows of different threads, or of different heads, are added only at the end."""
    return max(heads, min(config.rows, max(1, config.threads * vector(problem) // config.block)))

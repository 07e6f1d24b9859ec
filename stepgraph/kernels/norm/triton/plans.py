"""Plans: what a call of the CUDA backend needs besides its tensors, computed once for each layout of the inputs.

A plan holds the launches of a call with all their numbers and constants, and the sizes of scratch memory.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stepgraph.compat import empty_strided
from stepgraph.kernels.norm.triton.config.limits import Config, Hardware, Problem, hardware, head_block, runs, vector
from stepgraph.kernels.norm.triton.config.rules import preferences
from stepgraph.kernels.norm.triton.launch import INTERPRETED, Launch, current_device, raw_stream
from stepgraph.kernels.norm.triton.rows import rows_of
from stepgraph.kernels.norm.triton.workspace import zeros

Tensor = torch.Tensor
Optional = Tensor | None

#: The GPU that the interpreter pretends to be: few processors, so that small shapes take every path.
INTERPRETED_HARDWARE = Hardware(4, 227 * 1024, dependent=False)


def hardware_of(x: Tensor) -> Hardware:
    """Limits of the device of ``x``."""
    return INTERPRETED_HARDWARE if INTERPRETED else hardware(x.device.index)


#: Size, stride and dtype of an output; None: the call has no such output.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None

_empty = empty_strided("cpu" if INTERPRETED else "cuda")


def form(shape: Sequence[int], dtype: torch.dtype, wanted: bool = True) -> Form:
    """The form of a contiguous output."""
    strides = (*itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1),)[::-1]
    return (tuple(shape), strides if shape else (), dtype) if wanted else None


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


class Plan:
    """A call of the CUDA backend: a function of its inputs that returns its outputs.

    ``inputs``: where the rows of each lie; or a weight, which kernels read contiguous; or None, as it is. Kernels take
    inputs, outputs and, unless ``words`` is None, a tensor of as many zeroed words of 64 bits (None for 0).
    """

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[Launch],
        inputs: Sequence[Place | Optional],
        outputs: Sequence[Form],
        words: int | None = None,
        add: Launch | None = None,
    ):
        self.device, self.index = device, device.index
        self.launches, self.outputs, self.words = launches, outputs, words
        #: Adds up the sums over rows that a backward's launch left in its last output.
        self.add = add
        self.copied = frozenset(
            i
            for i, x in enumerate(inputs)
            if x is not None and (x.copy if isinstance(x, Place) else not x.is_contiguous())
        )

    def run(self, *tensors: Optional) -> list[Optional]:
        """Allocate and launch, on the device of the plan and its current stream."""
        if not INTERPRETED and self.index != current_device():
            with torch.cuda.device(self.device):
                return self.run(*tensors)
        if self.copied:
            tensors = tuple(t.contiguous() if t is not None and i in self.copied else t for i, t in enumerate(tensors))
        outputs = [form and _empty(*form) for form in self.outputs]
        stream = None if INTERPRETED else raw_stream(self.index)
        words = self.words
        last = () if words is None else (zeros(self.device, stream, words) if words else None,)
        for launch in self.launches:
            launch.start(stream, *tensors, *outputs, *last)
        if self.add is not None:
            _, dw, db, partials = outputs
            self.add.start(stream, partials, db if dw is None else dw, db)
        return outputs


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
    cooperative: bool, hw: Hardware,
) -> tuple[Launch, ...]:  # fmt: skip
    """One launch; two under the interpreter, whose programs cannot exchange while they run."""
    modes = ("publish", "collect") if INTERPRETED and config.split > 1 else ("wait",)
    return tuple(
        Launch(
            kernel, numbers, constants | {"EXCHANGE": mode, "DEPENDENT": hw.dependent}, grid, warps=config.warps,
            registers=config.registers, cooperative=cooperative, dependent=hw.dependent and not cooperative,
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
    second = constants | {"EXCHANGE": "depend" if hw.dependent else "collect", "DEPENDENT": False}
    return (
        Launch(ahead, numbers, needed | {"DEPENDENT": hw.dependent}, grid, dependent=hw.dependent, **options),
        Launch(kernel, numbers, second, grid, dependent=hw.dependent, **options),
    )


def share_words(problem: Problem, config: Config, cover: Cover) -> int:
    """Words of memory through which the groups of a launch exchange: see `wide`."""
    if config.split == 1:
        return 0
    kinds = 1 + problem.layer
    steps = problem.period * math.ceil(math.ceil(problem.M / problem.period) / config.rows)
    turns = math.ceil(steps / cover.slots) + 1 if INTERPRETED or config.exchange == "launch" else 4
    return cover.groups * turns * kinds * config.split * config.rows


def pitch_of(problem: Problem) -> int:
    """Length of one plane of a slot: a multiple of 16 bytes."""
    return -(-problem.heads * problem.N // 4) * 4


def sum_rows(problem: Problem, config: Config, heads: int) -> int:
    """Rows of the accumulators: rows of different threads, or of different heads, are added only at the end."""
    return max(heads, min(config.rows, max(1, config.threads * vector(problem) // config.block)))

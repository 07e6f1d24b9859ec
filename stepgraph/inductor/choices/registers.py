"""Registers that a mixed-order reduction needs, from what it loads and from its tile.

Such a kernel reduces the same (M, N) values along rows and along columns: each program takes ``split`` rows, a tile of
``rows`` whole rows at a time, and keeps one sum for each column and column reduction in registers throughout. The
values of a full-size load stay in registers across the reduction along the row, because they are needed after it.
"""

import math
from dataclasses import dataclass

#: Registers that a thread of an NVIDIA GPU can address, and those of an SM.
REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 65536

# Fitted to what ptxas reports (sm_90, Triton 3.6, loads not pipelined) for 93 kernels that Inductor 2.11 makes of norms
# with scaled and mixed residuals, N from 512 to 2048, bf16 and fp32: mean error 8%. The limit of 255 separates them:
# kernels that spill are estimated at 284 and more, kernels that do not at 244 and less. Pipelined loads (2.13's
# default) wait in shared memory: the estimate is then high for kernels with many loads.
BASE = 24  # addresses, loop, masks
WORKING = 2.5  # fp32 values held per element of the tile: the product being reduced, what follows the reduction
WORKING_ROWS = 1.0  # the same in a kernel that reduces along rows alone
FULL_HELD = 0.7  # share of a full-size load's bytes that live across the row's reduction
COLUMN_HELD = 0.5  # the same for a load of one value per column
MARGIN = 8  # how far an estimate must stay below the limit


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at a time: ``rows`` (XBLOCK) of all ``columns``, by ``warps``, loads in
    ``stages``; ``split`` is the number of rows it goes through."""

    rows: int
    columns: int
    warps: int
    stages: int
    split: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def elements(self) -> float:
        """Elements of the tile per thread."""
        return self.rows * self.columns / self.threads

    @property
    def register_limit(self) -> int:
        """Registers that a thread can have in a program of this size."""
        return min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // self.threads)

    def columns_held(self, bytes_per_element: int) -> float:
        """Columns per thread: a thread loads 16 bytes, and threads left over by one row take others."""
        return max(self.columns / self.threads, min(16 // bytes_per_element, self.columns))

    def __str__(self) -> str:
        return f"tile {self.rows} x {self.columns}, {self.warps} warps, stages {self.stages}, split {self.split}"


@dataclass(frozen=True)
class Loads:
    """What a kernel reads from memory, as bytes per element of each buffer, and how many sums per column it keeps.

    ``full``: buffers of (M, N); ``row``: of (M, 1); ``column``: of (N,). ``accumulators``: reductions along columns.
    """

    full: tuple[int, ...]
    row: tuple[int, ...]
    column: tuple[int, ...]
    accumulators: int

    def __str__(self) -> str:
        return f"loads {len(self.full)} full, {len(self.row)} row, {len(self.column)} column, {self.accumulators} sums"


def estimate(loads: Loads, tile: Tile) -> int:
    """Registers per thread."""
    held = tile.columns_held(min(loads.full, default=4))
    rows_held = tile.elements / held
    working = WORKING if loads.accumulators else WORKING_ROWS
    return math.ceil(
        BASE
        + tile.elements * (working + FULL_HELD * sum(loads.full) / 4)
        + rows_held * sum(loads.row) / 4
        + held * (COLUMN_HELD * sum(loads.column) / 4 + loads.accumulators)
    )

"""Tiles for reductions along rows, on Hopper and Blackwell, without timing anything while compiling.

Left alone (torch 2.11), Inductor compiles RMSNorm's backward at 16384 x 4096 in bf16 so: dx and dw are fused, in 1,024
programs of 8 warps and 16 rows, one row at a time. Loads are not pipelined (``mix_order_reduction_allow_multi_stages``
is off in 2.11): each row waits for memory and then for its reduction. The partial sums are 1,024 x 4096 fp32: 17 MB to
write, and to read again in a sum and a cast of their own. At 65536 x 256 its programs have one warp each. For rows
longer than half their number it does not fuse at all.

Here a program keeps its SM busy: there are few programs, so that partial sums are few; loads are pipelined over rows,
with 64 KB in flight per SM, as memory latency requires; forward kernels hold their rows in registers instead of reading
them twice.

Idea: "SOTA Normalization Performance with torch.compile", the PyTorch blog.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.nodes import shape_of
from stepgraph.inductor.choices.registers import MARGIN, Loads, Tile, estimate

IN_FLIGHT = 64 * 1024  # bytes of loads in flight, per SM
LONGEST = 16384  # columns that one program holds
FEWEST_ROWS = 2048  # below, a program has few rows to sum over
FEWEST_ELEMENTS = 5 * 2**20  # below, data stays in the L2 cache and fusing gains nothing; Inductor's own bound


@dataclass
class Tuning:
    """The rule. Tiles are for 2-byte values, and smaller if by the estimate of registers wider values do not fit."""

    graphs_compiled: int = 0
    graphs_seen: int = 0

    def settings(self) -> tuple[Any, ...]:
        return ("tuned_reductions",)

    def mixed_tile(self, rows: int, columns: int, loads: Loads, processors: int) -> Tile:
        """Tile of a reduction along rows and columns at once."""
        width = power_of_2_from(columns)
        # Enough threads to load a row at once, but few enough for several programs per SM.
        warps = {256: 1, 512: 2, 1024: 4, 2048: 4, 4096: 8}.get(width, 1 if width < 256 else 16)
        tile = Tile(math.gcd(rows, max(1, 1024 * warps // width)), width, warps, 3 if width <= 8192 else 2, 0)
        while tile.rows > 1 and estimate(loads, tile) > tile.register_limit - MARGIN:
            tile = replace(tile, rows=tile.rows // 2)
        bytes_of_row = width * sum(loads.full)
        programs = max(1, round(IN_FLIGHT / ((tile.stages - 1) * tile.rows * bytes_of_row)))
        split = math.ceil(rows / (processors * programs) / tile.rows) * tile.rows
        return replace(tile, split=split)

    def inner_tile(self, rows: int, columns: int, loads: Loads) -> Tile | None:
        """Tile of whole rows, for a reduction along rows alone; None leaves it to Inductor."""
        width = power_of_2_from(columns)
        if not 256 <= width <= LONGEST:
            return None
        threads_of_row = min(512, width // 16)
        tile_rows = max(1, 128 // threads_of_row)
        tile = Tile(tile_rows, width, tile_rows * threads_of_row // 32, 1, 0)
        return tile if rows >= tile_rows and estimate(loads, tile) <= tile.register_limit else None

    def can_fuse(self, node1: Any, node2: Any) -> bool:
        """False for small mixed-order reductions: `tuned_reductions` makes Inductor fuse reductions of any size."""
        mixed = compat.inductor().MixOrderReduction
        if not mixed.can_fuse(node1, node2):
            return True
        rows, columns = shape_of(node1 if mixed.is_contiguous_node(node1) else node2)
        return rows >= FEWEST_ROWS and rows * columns >= FEWEST_ELEMENTS


def mixed_tile(tuning: Tuning | None, rows: int, columns: int, loads: Loads, device: Any) -> Tile:
    """The tile that the kernel would get: of the tuning that is active, or Inductor's own."""
    parts = compat.inductor()
    processors = parts.DeviceProperties.create(device).multi_processor_count
    tile = tuning and tuning.mixed_tile(rows, columns, loads, processors)
    if tile:
        return tile
    split = parts.config.triton.mix_order_reduction_split_size
    if split is None:  # Inductor's own rule: eight programs per processor, of 16 to 128 rows
        split = min(max(parts.last_power_of_2(max(1, rows // (8 * processors))), 16), 128)
    config = compat.inductor_mixed_config(rows, columns, split, device)
    columns = parts.next_power_of_2(columns)
    return Tile(config.kwargs["XBLOCK"], columns, config.num_warps, config.kwargs["NUM_STAGES"], split)


def power_of_2_from(n: int) -> int:
    return 1 << (n - 1).bit_length()

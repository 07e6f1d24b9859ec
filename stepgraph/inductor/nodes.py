"""What nodes of Inductor's scheduler read and sum, and the tile that a mixed-order reduction of them gets."""

from typing import Any

from stepgraph import compat
from stepgraph.inductor.registers import Loads, Tile
from stepgraph.inductor.scope import Rules


def size(expression: Any) -> int:
    """A size as a number; of a dynamic size the one that was seen."""
    return compat.inductor().V.graph.sizevars.optimization_hint(expression, fallback=8192)


def shape_of(along_rows: Any) -> tuple[int, int]:
    """(rows, columns) of a reduction along rows."""
    rows, columns = compat.inductor().MixOrderReduction.get_numel_rnumel(along_rows)
    return size(rows), size(columns)


def column_sums(nodes: list[Any], along_rows: Any) -> list[Any]:
    """The reductions along columns among ``nodes``, which share their shape with the reduction ``along_rows``."""
    numels = compat.inductor().MixOrderReduction.get_numel_rnumel
    shape = tuple(numels(along_rows))
    return [node for node in nodes if node.is_reduction() and tuple(numels(node)) != shape]


def loads_of(nodes: list[Any], rows: int, columns: int, sums: int) -> Loads:
    """What a kernel of ``nodes`` reads that it does not make itself; ``sums``: how many per column it keeps."""
    parts = compat.inductor()
    made = {dep.name for node in nodes for dep in node.read_writes.writes}
    elements: dict[str, int] = {}
    for node in nodes:
        for dep in node.read_writes.reads:
            if isinstance(dep, parts.MemoryDep) and dep.name not in made:
                touched = 1
                for variable in dep.index.free_symbols & dep.ranges.keys():
                    touched *= size(dep.ranges[variable])
                elements[dep.name] = max(elements.get(dep.name, 0), touched)
    kinds: dict[str, list[int]] = {"full": [], "row": [], "column": []}
    for name, touched in elements.items():
        # A column sum in two steps goes over slightly more than rows x columns elements, masked.
        kind = "full" if 2 * touched >= rows * columns else "row" if touched >= rows else "column"
        kinds[kind].append(parts.V.graph.get_dtype(name).itemsize)
    return Loads(*(tuple(sorted(kinds[kind])) for kind in ("full", "row", "column")), sums)


def mixed_tile(rules: Rules, rows: int, columns: int, loads: Loads, device: Any) -> Tile:
    """The tile that the kernel would get: of the tuning that is active, or Inductor's own."""
    parts = compat.inductor()
    processors = parts.DeviceProperties.create(device).multi_processor_count
    tile = rules.tuning and rules.tuning.mixed_tile(rows, columns, loads, processors)
    if tile:
        return tile
    split = parts.config.triton.mix_order_reduction_split_size
    if split is None:  # as Inductor has it: eight programs per processor, of 16 to 128 rows
        split = min(max(parts.last_power_of_2(max(1, rows // (8 * processors))), 16), 128)
    config = compat.inductor_mixed_config(rows, columns, split, device)
    columns = parts.next_power_of_2(columns)
    return Tile(config.kwargs["XBLOCK"], columns, config.num_warps, config.kwargs["NUM_STAGES"], split)

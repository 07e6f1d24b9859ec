"""What nodes of Inductor's scheduler read and sum."""

from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.registers import Loads


def size(expression: Any) -> int:
    """A size as a number; of a dynamic size, the one seen when compiling."""
    return compat.inductor().V.graph.sizevars.optimization_hint(expression, fallback=8192)


def shape_of(along_rows: Any) -> tuple[int, int]:
    """(rows, columns) of a reduction along rows."""
    rows, columns = compat.inductor().MixOrderReduction.get_numel_rnumel(along_rows)
    return size(rows), size(columns)


def column_sums(nodes: list[Any], along_rows: Any) -> list[Any]:
    """Those of ``nodes`` that reduce along columns, unlike ``along_rows``, which reduces the same shape along rows."""
    numels = compat.inductor().MixOrderReduction.get_numel_rnumel
    shape = tuple(numels(along_rows))
    return [node for node in nodes if node.is_reduction() and tuple(numels(node)) != shape]


def loads_of(nodes: list[Any], rows: int, columns: int, sums: int) -> Loads:
    """What a kernel of ``nodes`` loads from memory; ``sums``: how many column sums it keeps."""
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

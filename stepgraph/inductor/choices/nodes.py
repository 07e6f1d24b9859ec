"""Which values nodes of Inductor's scheduler read and sum."""

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
    mixed = compat.inductor().MixOrderReduction
    rows, columns = shape = tuple(mixed.get_numel_rnumel(along_rows))

    def other(node: Any) -> bool:
        if rows == columns:
            return not mixed.is_contiguous_node(node)
        return tuple(mixed.get_numel_rnumel(node)) != shape

    return [node for node in nodes if node.is_reduction() and other(node)]


def cross_a_square(node1: Any, node2: Any) -> bool:
    """Whether one node reduces a square along rows and the other along columns: their sizes do not show it."""
    mixed = compat.inductor().MixOrderReduction
    numels = tuple(mixed.get_numel_rnumel(node1))
    if len(numels) != 2 or numels[0] != numels[1] or numels != tuple(mixed.get_numel_rnumel(node2)):
        return False
    return mixed.is_contiguous_node(node1) != mixed.is_contiguous_node(node2)


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

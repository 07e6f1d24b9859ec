"""Finds the node of the graph whose collective the ranks are waiting in.

torch's flight recorder knows the process group of each collective, when it was issued and whether it is done, but not
its node. A step issues each group's collectives in the graph's order, which Inductor keeps. So the k-th collective that
a group issued since the step began is the group's k-th node.
"""

import bisect
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from stepgraph import compat
from stepgraph.graph.collectives import group_of, is_nccl, stage_of
from stepgraph.graph.facts import OpOverload
from stepgraph.graph.provenance import provenance


class InFlight(NamedTuple):
    """A collective that was issued and is not done. ``node``: its node, or None if it is not one of the step's.
    ``what``: the recorder's name for the operation. ``others``: how many issued after it are not done either."""

    node: fx.Node | None
    what: str
    others: int

    def __str__(self) -> str:
        more = f" ({self.others} issued after it wait too)" if self.others else ""
        return f"{self.what if self.node is None else describe(self.node)}{more}"


def issue_order(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The collectives of each process group, by torch's name of it, in the order in which a step issues them."""
    order: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_nccl(node) and stage_of(node) == "begin":
            order[compat.group_name(group_of(node))].append(node)
    return dict(order)


def first_in_flight(
    records: Sequence[Mapping[str, Any]], order: Mapping[str, Sequence[fx.Node]], began_ns: Sequence[int]
) -> InFlight | None:
    """The earliest of the collectives in ``records`` (see `compat.flight_records`) that is not done; None if all are.

    ``order``: as `issue_order` gives it. ``began_ns``: when the launch of each of the latest steps began, the earliest
    first, in nanoseconds since the epoch; there are several because on a GPU the next step is launched before the
    results of one are read. A collective gets no node if the graph has none in its place, or one of another size.
    """
    numbers: dict[tuple[str, int], int] = defaultdict(int)
    waiting: list[tuple[Mapping[str, Any], fx.Node | None]] = []
    for record in records:
        group = record["process_group"][0]
        node = None
        if step := bisect.bisect_right(began_ns, record["time_created_ns"]):
            nodes, number = order.get(group, ()), numbers[group, step]
            numbers[group, step] += 1
            node = nodes[number] if number < len(nodes) and _fits(nodes[number], record) else None
        if not record["retired"] and record["state"] != "completed":
            waiting.append((record, node))
    if not waiting:
        return None
    record, node = waiting[0]
    operation = record["profiling_name"].partition(":")[2]
    return InFlight(node, f"{operation} of process group {record['process_group'][1]}", len(waiting) - 1)


def _fits(node: fx.Node, record: Mapping[str, Any]) -> bool:
    """Whether record and node have equally many input elements; their names depend on the backend."""
    return node.args[0].meta["val"].numel() == sum(map(math.prod, record["input_sizes"]))


def describe(node: fx.Node) -> str:
    """``name (operator) of module path, phase, file:line``."""
    found = provenance(node)
    operator = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else str(node.target)
    file, _, line = found.source.rpartition(":")
    return f"{node.name} ({operator}) of {found.path or 'the model'}, {found.phase}, {os.path.basename(file)}:{line}"

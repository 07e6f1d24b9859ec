"""The fusion guard: Inductor may fuse mixed-order reductions only as long as no register spills.

A norm's backward reduces the same values along rows (dx) and along columns (dw, db); since PyTorch 2.10 Inductor fuses
the two, and then whatever else reads those values. With scaled and mixed residuals it can fuse so much that registers
spill and the kernel is slower than its parts (pytorch issue 179423). For the first pair, and for each fusion after it,
the guard estimates the registers that the kernel would need at its tile, and refuses what would spill.

It also refuses two fusions whose results are silently wrong: a column sum whose output is a view of a larger buffer,
such as a slice of a concatenation, is never written there (pytorch issue 193061, up to torch 2.14); and if the rows do
not fill the last tile, the sum includes what lies beyond them (pytorch issue 195845).

Idea: pytorch pull request 179494, which counts loads.
"""

from dataclasses import dataclass, field
from typing import Any

from stepgraph import compat
from stepgraph.inductor.choices.nodes import column_sums, loads_of, shape_of
from stepgraph.inductor.choices.reduction_tuning import Tuning, mixed_tile
from stepgraph.inductor.choices.registers import MARGIN, REGISTERS_PER_THREAD, Loads, Tile, estimate

SPILL = "would spill"
VIEW = "a column sum is a view of a larger buffer, which the fused kernel would not write"
RAGGED = "rows do not fill the last tile, and the fused kernel would sum what lies beyond"


@dataclass(frozen=True)
class Decision:
    """One fusion that Inductor wanted. ``operations``: its scheduler's names; ``what``: the sums' names in the graph.
    ``registers`` and ``limit`` are per thread; ``reason`` is empty where the fusion was allowed."""

    backward: bool
    operations: frozenset[str]
    what: str
    rows: int
    loads: Loads
    tile: Tile
    registers: int
    limit: int
    reason: str

    @property
    def allowed(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        verdict = "allowed" if self.allowed else f"refused ({self.reason})"
        return (
            f"{'backward' if self.backward else 'forward'}: {self.what}: {self.rows} x {self.tile.columns}, "
            f"{self.loads}: about {self.registers} of {self.limit} registers ({self.tile}): {verdict}"
        )


@dataclass
class Guard:
    """The rule, and its decisions in order. ``made``: the operations of each fused kernel that was generated."""

    max_registers: int | None = None
    decisions: dict[Decision, None] = field(default_factory=dict)
    made: list[frozenset[str]] = field(default_factory=list)
    graphs_compiled: int = 0
    graphs_seen: int = 0

    def settings(self) -> tuple[Any, ...]:
        return ("fusion_guard", self.max_registers)

    def refused(self) -> list[Decision]:
        return [decision for decision in self.decisions if not decision.allowed]

    def allowed(self) -> list[Decision]:
        """The fused kernels that were generated; Inductor also asks about fusions that it then does not make."""
        allowed = sorted((d for d in self.decisions if d.allowed), key=lambda d: len(d.operations))
        return [next(d for d in allowed if made <= d.operations) for made in self.made]

    def __str__(self) -> str:
        lines = [str(decision) for decision in self.allowed() + self.refused()]
        if self.graphs_compiled == 0:
            lines.append("no graph was compiled: what the compile cache holds was decided when it was compiled")
        elif not lines:
            lines.append("no mixed-order reductions to fuse")
        return "\n".join(lines)

    def can_fuse(self, tuning: Tuning | None, scheduler: Any, node1: Any, node2: Any) -> bool:
        """Whether Inductor may fuse two nodes of its scheduler; True unless that makes a mixed-order reduction."""
        parts = compat.inductor()
        whole = [scheduler.get_fused_node(node) for node in (node1, node2)]
        mixed = [node for node in whole if isinstance(node, parts.FusedMixOrderReductions)]
        if mixed:
            along_rows = mixed[0].node1
        elif parts.MixOrderReduction.can_fuse(node1, node2):
            along_rows = node1 if parts.MixOrderReduction.is_contiguous_node(node1) else node2
        else:
            return True
        nodes = list(dict.fromkeys(sub for node in whole for sub in node.get_nodes()))
        decision = self._decide(tuning, nodes, along_rows)
        self.decisions[decision] = None
        return decision.allowed

    def _decide(self, tuning: Tuning | None, nodes: list[Any], along_rows: Any) -> Decision:
        rows, columns = shape_of(along_rows)
        sums = column_sums(nodes, along_rows)
        loads = loads_of(nodes, rows, columns, len(sums))
        tile = mixed_tile(tuning, rows, columns, loads, along_rows.get_device())
        registers = estimate(loads, tile)
        limit = min(tile.register_limit - MARGIN, self.max_registers or REGISTERS_PER_THREAD)
        if any(lives_elsewhere(node) for node in sums):
            reason = VIEW
        elif rows % tile.rows:
            reason = RAGGED
        else:
            reason = SPILL if registers > limit else ""
        return Decision(
            bool(compat.inductor().V.graph.is_backward),
            frozenset(node.get_name() for node in nodes),
            " + ".join(sorted(origin(node) for node in nodes if node.is_reduction())),
            rows,
            loads,
            tile,
            registers,
            limit,
            reason,
        )


def lives_elsewhere(node: Any) -> bool:
    """Whether a column sum is written into another buffer's memory."""
    results = node.get_outputs()
    if node.node._split_size:  # a second step, which the fused kernel replaces, makes the result
        results = results[0].users[0].node.get_outputs()
    return any(result.get_aliases() or result.get_mutations() for result in results)


def origin(node: Any) -> str:
    """Name of the graph node that a scheduler node computes: the last one of those it was made from."""
    return max(node.node.origins).name if node.node.origins else node.get_name()

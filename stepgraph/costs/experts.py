"""Costs of expert rows: how many rows of a buffer the routing fills, and the products of them.

A buffer that a rank receives rows of other ranks in has a fixed size, larger than balanced routing needs. Grouped
products stop at the last row of the last expert, and our SwiGLU reads no further; everything else works on the whole
buffer, an exchange by torch's collectives too, and one over symmetric memory on the rows that exist.
"""

import torch
from torch import fx

import stepgraph.kernels.moe  # noqa: F401  (registers its operators)
from stepgraph.graph.collectives import ROWS_BEGIN, stage_of
from stepgraph.graph.facts import argument, of_target
from stepgraph.graph.provenance import role_of
from stepgraph.kernels.fp8.formats import MULTIPLE

ours = torch.ops.stepgraph

#: Products of the rows of all experts.
GROUPED = {ours.grouped_mm.default, ours.grouped_mm_weight.default, torch.ops.aten._grouped_mm.default}
GROUPED |= {ours.grouped_scaled_mm.default, ours.grouped_scaled_mm_weight.default}
_grouped = of_target(GROUPED.__contains__)

#: Write nothing past the last expert's rows.
LEAVING = {ours.swiglu_rows_cast.default, ours.swiglu_rows_cast_backward.default, ours.cast_scaled_groups.default}

#: Read no row past the last expert's, and write zeros there, or nothing.
ROWWISE = LEAVING | {ours.swiglu_rows.default, ours.swiglu_rows_backward.default}
reads_filled = of_target(ROWWISE.__contains__)


def filled(graph: fx.Graph, load: float = 1.0) -> dict[int, float]:
    """The share of its rows that routing fills, of each size of buffer that experts receive rows in.

    ``load``: rows that this rank receives over the mean of all ranks. On average a rank receives as many as it sends,
    one for each of its tokens' slots.
    """
    shares: dict[int, float] = {}
    for node in graph.nodes:
        role = role_of(node)
        if stage_of(node) == "begin" and role and role.kind == "dispatch":
            if node.target is ROWS_BEGIN:
                to, came = (argument(node, name).meta["val"].numel() for name in ("to", "came"))
                if argument(node, "order") is not None:  # to experts
                    shares[came] = min(1.0, load * to / came)
                continue
            sent = node.all_input_nodes[0]
            if sent.target is ours.gather_rows.default:
                rows = sent.meta["val"].shape[0]
                shares[rows] = min(1.0, load * argument(sent, "places").meta["val"].numel() / rows)
    return shares


def is_grouped(node: fx.Node) -> bool:
    """Whether the node is a product of the rows of all experts."""
    return _grouped(node.target)


def rows_of(node: fx.Node) -> int:
    """Rows of the buffer that the grouped product, or the SwiGLU, ``node`` works on."""
    first = node.args[0].meta["val"]  # of torch's products that of a weight's gradient has them in columns
    weights = node.target is torch.ops.aten._grouped_mm.default and node.args[1].meta["val"].ndim == 2
    if node.target is ours.grouped_scaled_mm_weight.default:
        return first.shape[1] - MULTIPLE * len(argument(node, "ends").meta["val"])  # the parts of experts are padded
    return first.shape[1 if weights else 0]

"""Mixture-of-experts kernels after the router: rows sorted by expert, grouped products, rows brought back.

    order, places, counts = sort_by_expert(chosen, n_experts)       # chosen (N, K): the experts of each token
    offsets = counts.cumsum(0, dtype=torch.int32)
    rows = gather_rows(x, order, places)                            # (N, D) -> (N * K, D)
    rows = grouped_mm(rows, weight, offsets)                        # weight (E, D, F), one product for all experts
    rows = swiglu_rows(rows, offsets)                               # (N * K, 2F) -> (N * K, F)
    x = combine_rows(rows, places, weights, order)                  # (N * K, F) -> (N, F)

Everything stays on the device: sizes are fixed, counts are tensors. Deterministic, forward and backward.
"""

from stepgraph.kernels.moe.grouped import grouped_mm, grouped_mm_weight
from stepgraph.kernels.moe.route import sort_by_expert
from stepgraph.kernels.moe.rows import combine_rows, gather_rows
from stepgraph.kernels.moe.scaled import (
    cast_packed_rows,
    cast_scaled_groups,
    grouped_scaled_mm,
    grouped_scaled_mm_weight,
)
from stepgraph.kernels.moe.swiglu import swiglu_rows, swiglu_rows_cast, swiglu_rows_cast_backward

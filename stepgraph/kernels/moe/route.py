"""The slots of all tokens sorted by expert: where each row of the experts comes from, and where each slot goes to.

    places[n, k] = slots of lower experts + earlier slots of the same expert        order[places[n, k]] = n * K + k

A stable counting sort: slots of one expert keep their order, so that the same routing gives the same rows, bit for bit.
"""

import torch

from stepgraph.kernels.operator import operator


def reference(chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, places, counts) in plain torch; arguments as in `sort_by_expert`."""
    flat = chosen.reshape(-1)
    used = (flat >= 0) & (flat < n_experts)
    order = torch.where(used, flat, n_experts).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    counts = (flat.unsqueeze(1) == torch.arange(n_experts, device=flat.device)).sum(0)
    order, places = torch.where(used[order], order, -1), torch.where(used, places, -1)
    return order.int(), places.int().view(chosen.shape), counts.int()


def _check(chosen: torch.Tensor, n_experts: int) -> None:
    if chosen.ndim != 2 or chosen.dtype not in (torch.int64, torch.int32) or n_experts < 1:
        raise ValueError(
            f"sort_by_expert got chosen of {chosen.dtype} {tuple(chosen.shape)} and {n_experts} experts; allowed is "
            "(N, K) of int64 or int32, and one expert or more: pass the indices that topk gives"
        )


def _empty(chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = chosen.new_empty(chosen.numel(), dtype=torch.int32)
    places = chosen.new_empty(chosen.shape, dtype=torch.int32)
    return order, places, chosen.new_empty(n_experts, dtype=torch.int32)


@operator(_empty, launch="moe.route_triton:launch", takes=lambda x: x.is_cuda and x.numel(), check=_check)
def sort_by_expert(chosen: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the slots of all tokens by expert.

    Args:
        chosen: (N, K) int64 or int32, the expert of each of a token's K slots. One outside [0, n_experts) means that
            the slot is not used: it has no row.
        n_experts: E.

    Returns:
        ``order`` (N * K,) int32: the flat slot ``n * K + k`` that stands at each row; -1 at the end, where there are
        fewer used slots than rows.
        ``places`` (N, K) int32: its inverse, the row of each slot; -1 for a slot that is not used.
        ``counts`` (E,) int32: rows of each expert.

    Deterministic and stable. The host does not wait for the GPU. No gradient.
    """
    return reference(chosen, n_experts)

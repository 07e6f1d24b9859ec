"""How DTensor runs the operators: rows may be sharded, the normalized dimension may not.

With sharded rows each rank normalizes its own, and the gradients of weight and bias are partial sums. With sharded
heads and per-head weights, the weights and their gradients are sharded like the heads.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import stepgraph.kernels.norm.operators  # noqa: F401  (defines what is registered for below)

ops = torch.ops.stepgraph


def _refuse_hidden(name: str, tensor: DTensor) -> None:
    hidden = tensor.ndim - 1
    if any(placement.is_shard(hidden) for placement in tensor.placements):
        raise ValueError(
            f"{name} is placed {tensor.placements}, its normalized dimension {hidden} sharded; allowed is "
            f"Replicate, or Shard of another dimension: call {name}.redistribute(...) first"
        )


def check(x: torch.Tensor) -> None:
    """Raise ``ValueError`` for a DTensor sharded in its last dimension; raised inside DTensor it would come wrapped."""
    if isinstance(x, DTensor):
        _refuse_hidden("x", x)


def _strategies(dims: int, weight: torch.Tensor | None, strategy: Callable) -> list:
    """``strategy(rows, weights, weight gradients)`` for tensors replicated, and sharded in each leading dimension."""
    found = [strategy(Replicate(), Replicate(), Replicate())]
    for dim in range(dims - 1):
        per_head = weight is not None and weight.ndim == 2 and dim == dims - 2
        found.append(strategy(Shard(dim), *((Shard(0), Shard(0)) if per_head else (Replicate(), Partial()))))
    return found


def _if(present: object, placement: Placement) -> Placement | None:
    return None if present is None or present is False else placement


@register_sharding(ops.norm.default)
def _norm(x, weight, bias, residual, out_dtype, kind, eps, weight_offset, keep_h):
    _refuse_hidden("x", x)

    def strategy(rows: Placement, weights: Placement, _: Placement) -> tuple[list, list]:
        h = rows if residual is not None and keep_h else None
        outputs = [rows, h, rows if kind == "layer" else None, rows]
        inputs = [rows, _if(weight, weights), _if(bias, weights), _if(residual, rows)]
        return outputs, inputs + [None] * 5

    return _strategies(x.ndim, weight, strategy)


@register_sharding(ops.norm_backward.default)
def _norm_backward(
    dy, h, weight, mean, rstd, dh, out_dtype, kind, eps, weight_offset, dx_dtype, need_dx, need_dw, need_db
):
    _refuse_hidden("h", h)

    def strategy(rows: Placement, weights: Placement, sums: Placement) -> tuple[list, list]:
        outputs = [_if(need_dx, rows), _if(need_dw, sums), _if(need_db, sums)]
        inputs = [rows, rows, _if(weight, weights), _if(mean, rows), rows, _if(dh, rows)]
        return outputs, inputs + [None] * 8

    return _strategies(h.ndim, weight, strategy)

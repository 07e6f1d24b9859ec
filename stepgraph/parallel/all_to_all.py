"""An all-to-all with a gradient and a role."""

from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.roles import declare


class AllToAll(torch.autograd.Function):
    """Part r of ``x`` along dimension 0 goes to rank r of ``group``, what came from rank r is part r of the result;
    its gradient travels back the same way. ``kind``, ``axis``: of the collectives' role."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, kind: str, axis: str) -> torch.Tensor:
        ctx.where = group, kind, axis
        return swap(x, *ctx.where)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return swap(grad.contiguous(), *ctx.where), None, None, None


def swap(parts: torch.Tensor, group: dist.ProcessGroup, kind: str, axis: str) -> torch.Tensor:
    """`AllToAll` without a gradient, of contiguous ``parts``."""
    swapped = compat.all_to_all(parts, group)
    declare(swapped, kind, axis)
    return swapped

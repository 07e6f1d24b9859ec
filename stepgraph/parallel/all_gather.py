"""An all-gather with a gradient and a role."""

from typing import Any

import torch
import torch.distributed as dist

from stepgraph import compat
from stepgraph.capture.roles import declare


class AllGather(torch.autograd.Function):
    """``x`` of each rank of ``group``, one after the other along dimension 0; the gradient is this rank's part of the
    sum of the ranks'. ``kind``, ``axis``: of the collectives' role."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, kind: str, axis: str) -> torch.Tensor:
        ctx.group, ctx.role = group, (kind, axis)
        whole = compat.all_gather(x, group)
        declare(whole, kind, axis)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        part = compat.reduce_scatter(grad.contiguous(), ctx.group)
        declare(part, *ctx.role)
        return part, None, None, None

"""Calls of `single` made again, for tensors alike (`stepgraph.compat.alike`) to those of an earlier call.

Its plan is found once. What is left, to allocate and to launch, becomes a function, which takes half the time.
"""

from collections.abc import Callable

import torch

from stepgraph.kernels.norm.spec import Norm
from stepgraph.kernels.norm.triton import plans, single
from stepgraph.kernels.norm.triton.launch import INTERPRETED, current_device, raw_stream
from stepgraph.kernels.norm.triton.workspace import zeros

Tensor = torch.Tensor
Optional = Tensor | None

#: x, weight and bias to y, mean and rstd: `single.forward` without a residual.
Forward = Callable[[Tensor, Tensor, Optional], tuple[Tensor, Optional, Tensor]]

#: dy, x, weight, mean and rstd to dx, dw and db: `single.backward` without ``dh``.
Backward = Callable[[Tensor, Tensor, Tensor, Optional, Tensor], tuple[Optional, Optional, Optional]]


def forward(norm: Norm, x: Tensor, weight: Tensor, bias: Optional) -> Forward | None:
    """The call for tensors alike to these. None where each reads a copy of one.

    Raises ``ValueError`` as `check` does.
    """
    plan = single.forward_plan(norm, x, weight, bias, None, True)
    if INTERPRETED or plan.copies:
        return None
    *ahead, launch = plan.launches
    count, device = plan.words, x.device
    index = device.index
    new_y, _, new_mean, new_rstd, _, _ = plans.allocators(plan.outputs)

    def run(x: Tensor, weight: Tensor, bias: Optional) -> tuple[Tensor, Optional, Tensor]:
        if current_device() != index:
            y, _, mean, rstd, _ = single.forward(norm, x, weight, bias, None, True)
            return y, mean, rstd
        y, mean, rstd = new_y(), new_mean(), new_rstd()
        stream = raw_stream(index)
        words = None
        if count:
            words = plans.scratch(count) if ahead else zeros(device, stream, count)
        for first in ahead:
            first.start(stream, x, None, weight, bias, y, None, mean, rstd, None, None, words)
        launch.start(stream, x, None, weight, bias, y, None, mean, rstd, None, None, words)
        return y, mean, rstd

    return run


def backward(
    norm: Norm, dy: Tensor, x: Tensor, weight: Tensor, mean: Optional, rstd: Tensor, needs: tuple[bool, bool, bool]
) -> Backward | None:
    """The call for tensors alike to these, whose dx, dw and db are wanted as ``needs`` says. None as in `forward`."""
    plan = single.backward_plan(norm, dy, x, weight, mean, rstd, None, x.dtype, *needs)
    if INTERPRETED or plan.copies:
        return None
    (launch,), device = plan.launches, x.device
    add, count, index = plan.add, plan.words, device.index
    new_dx, new_dw, new_db, new_partials = plans.allocators(plan.outputs)
    need_dw = needs[1]

    def run(dy: Tensor, x: Tensor, weight: Tensor, mean: Optional, rstd: Tensor) -> tuple[Optional, Optional, Optional]:
        if current_device() != index:
            return single.backward(norm, dy, x, weight, mean, rstd, None, x.dtype, *needs)
        dx, dw, db, partials = new_dx(), new_dw(), new_db(), new_partials()
        stream = raw_stream(index)
        words = zeros(device, stream, count) if count else None
        launch.start(stream, dy, x, weight, mean, rstd, None, dx, dw, db, partials, words)
        if add is not None:
            add.start(stream, partials, dw if need_dw else db, db)
        return dx, dw, db

    return run

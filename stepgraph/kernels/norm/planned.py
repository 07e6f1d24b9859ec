"""Plans of calls: what a call computes from its options and the layouts of its tensors, once for each of them.

A plan is a function of the call's tensors. Later calls find it and check, choose and compute nothing again: on a GPU
this is most of what the host does before a launch.
"""

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Optional = Tensor | None

_MOST_PLANS = 8192

#: All are dropped when there are too many.
PLANS: dict[Any, Callable[..., Any]] = {}


def planned(
    build: Callable[..., Any], options: tuple[Any, ...], a: Tensor, b: Optional, c: Optional, d: Optional
) -> Callable[..., Any]:
    """``build(*options, a, b, ...)``, remembered under all that is known of tensors without reading their memory."""
    key = (
        build,
        options,
        (a.shape, a.stride(), a.dtype, a.device),
        b if b is None else (b.shape, b.stride(), b.dtype, b.device),
        c if c is None else (c.shape, c.stride(), c.dtype, c.device),
        d if d is None else (d.shape, d.stride(), d.dtype, d.device),
    )
    plan = PLANS.get(key)
    if plan is None:
        plan = build(*options, a, b, c, d)
        if len(PLANS) >= _MOST_PLANS:
            PLANS.clear()
        PLANS[key] = plan
    return plan

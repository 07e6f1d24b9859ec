"""Products of linear layers with a gated activation (SwiGLU, GeGLU) that follows, forward and backward, in one kernel
each.

    gated_product:           u = x w,    a = act(g) u
    gated_product_backward:  da = dy w,  dg = da u act'(g),  du = da act(g)

The gate ``g`` is the result of another product, so neither weights nor results have to be joined or interleaved. In
bf16 on a GPU they are QuACK's (`quack`), which take what follows from the sums of the product, in fp32; elsewhere each
step is rounded, as torch's operators do. Made by the pass `product_epilogues` after the step was traced: they have no
gradients of their own.
"""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels import quack
from stepgraph.kernels.gelu import on_device
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
aten = torch.ops.aten


def _check(x: Tensor, weight: Tensor, gate: Tensor, *others: object) -> None:
    *_, activation = others
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"got the activation {activation!r}; allowed are 'silu' and 'gelu_tanh'")


def _like(x: Tensor, weight: Tensor, gate: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


@operator(_like, launch=quack.gated_product, takes=on_device, check=_check)
def gated_product(x: Tensor, weight: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """u = ``x weight`` and act(gate) u, both (M, N), contiguous, in the dtype of ``gate``. x: (M, K). weight: (K, N),
    in any strides. gate: (M, N), contiguous. All of one floating dtype. ``activation``: ``silu``, or ``gelu_tanh`` for
    GELU by tanh. Raises ``ValueError`` for another activation, and in bf16 on a GPU where the package is missing."""
    u = x @ weight
    return u, _activated(gate, activation) * u


@operator(_like, launch=quack.gated_product_backward, takes=on_device, check=_check)
def gated_product_backward(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradients of ``gate`` and ``up``, both (M, N), contiguous, from ``dy`` (M, K), that of the product that reads
    ``act(gate) up``, whose weight is ``weight`` (K, N), in any strides. gate, up: (M, N), contiguous. ``activation``
    and errors as in `gated_product`."""
    da = dy @ weight
    if activation == "silu":
        dg = aten.silu_backward(da * up, gate)
    else:
        dg = aten.gelu_backward(da * up, gate, approximate="tanh")
    return dg, da * _activated(gate, activation)


for _product in (torch.ops.stepgraph.gated_product, torch.ops.stepgraph.gated_product_backward):
    register_flop_formula(_product)(lambda a_shape, b_shape, *_, **__: 2 * a_shape[0] * a_shape[1] * b_shape[1])

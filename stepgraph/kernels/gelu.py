"""Products of linear layers with the GELU that follows, forward and backward, in one kernel each.

    gelu_product:           z = x w + bias,            a = gelu(z)
    gelu_product_backward:  dz = (dy w) * gelu'(z),    db = the sum of dz's rows

In bf16 on a GPU they are QuACK's (`quack`), which take what follows from the sums of the product, in fp32; elsewhere
each step is rounded, as torch's operators do. Made by the pass `product_epilogues` after the step was traced: they have
no gradients of their own.
"""

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from stepgraph.kernels import quack
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor
aten = torch.ops.aten


def on_device(x: Tensor) -> bool:
    """Whether the package multiplies a matrix like ``x``."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _like(x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    z = x.new_empty(x.shape[0], weight.shape[1])
    return z, torch.empty_like(z)


def _like_backward(dy: Tensor, weight: Tensor, z: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[1:], dtype=torch.float32)


@operator(_like, launch=quack.gelu_product, takes=on_device)
def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    """z = ``x weight + bias`` and gelu(z), both (M, N), contiguous, in the dtype of ``x``. x: (M, K). weight: (K, N),
    in any strides. bias: (N,), or None. All of one floating dtype. ``approximate``: as in ``F.gelu``. Raises
    ``ValueError`` in bf16 on a GPU where the package is missing."""
    z = x @ weight if bias is None else torch.addmm(bias, x, weight)
    return z, F.gelu(z, approximate=approximate)


@operator(_like_backward, launch=quack.gelu_product_backward, takes=on_device)
def gelu_product_backward(dy: Tensor, weight: Tensor, z: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The gradients of ``z`` and of its bias: dz (M, N), contiguous, and its sum over rows, (N,) in fp32.

    ``dy`` (M, K): the gradient of the product ``gelu(z) @ weight.T``. ``weight`` (K, N), in any strides. ``z`` (M, N),
    contiguous. ``approximate`` and errors as in `gelu_product`."""
    dz = aten.gelu_backward(dy @ weight, z, approximate=approximate)
    return dz, dz.float().sum(0)


for _product in (torch.ops.stepgraph.gelu_product, torch.ops.stepgraph.gelu_product_backward):
    register_flop_formula(_product)(lambda a_shape, b_shape, *_, **__: 2 * a_shape[0] * a_shape[1] * b_shape[1])

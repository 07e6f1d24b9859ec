"""The product of two matrices in fp8, each with its scales: y = (a * scale_a) (b * scale_b)^T.

Both are read along the dimension that is summed over, as tensor cores of compute capability 9 need it. On a GPU it is
torch's ``_scaled_mm``; elsewhere the values are taken to fp32, which holds each of them and each product of two, and
multiplied there: what differs from a GPU's result is the order and the width of the sums.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from stepgraph import compat
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


def reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
    """`scaled_product` in plain torch: sums and bias in fp32, rounded once."""
    y = a.float() @ b.float().t()
    y = y * (scale_a.unsqueeze(1) if scale_a.ndim else scale_a) * scale_b
    return (y if bias is None else y + bias.float()).bfloat16()


@operator(lambda a, b, *_: a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16))
def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """The product of ``a`` (M, K) and ``b`` (N, K), contiguous, in float8_e4m3fn or float8_e5m2, not both in the
    latter: (M, N), contiguous, bf16. On a GPU 16 divides K and N.

    scale_a, scale_b: fp32 scalars, or (M,) and (N,) fp32. bias: None, or (N,) bf16, added before the result is rounded.
    fast: on a GPU, leave sums in the tensor cores' accumulators, whose numbers are shorter than fp32's.
    """
    if a.is_cuda:
        return compat.scaled_mm(a, b, scale_a, scale_b, bias, fast)
    return reference(a, b, scale_a, scale_b, bias)


register_flop_formula(torch.ops.stepgraph.scaled_product)(
    lambda a_shape, b_shape, *_, **__: 2 * a_shape[0] * a_shape[1] * b_shape[0]
)

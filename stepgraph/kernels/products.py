"""Matrix products by the fastest of cuBLASLt's algorithms for their shape that gives the same bits.

cuBLAS chooses an algorithm by heuristics. Of the eight that cuBLASLt offers for a shape, another one is often faster:
on an H200 by up to 14% for products with N > K, such as the first of an MLP (`benchmarks/h200_products.json`).
"""

import torch
from torch.utils.flop_counter import mm_flop, register_flop_formula

from stepgraph.kernels.cublas_lt import by_torch, multiply
from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


@operator(lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]), launch=multiply)
def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b``, and ``bias`` added, with the bits of ``torch.mm`` and ``torch.addmm``: (M, N), contiguous. a: (M, K),
    b: (K, N), in any strides; bias: None, or (N,). All of one dtype.

    On a GPU the first call for a shape, unless a CUDA graph is being captured, times cuBLASLt's algorithms and torch's;
    later calls use the fastest that gives torch's bits.
    """
    return by_torch(a, b, bias)


@register_flop_formula(torch.ops.stepgraph.product)
def _flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    return mm_flop(a, b)

"""A matrix of bytes with rows and columns exchanged, as products in fp8 need a weight for the gradient of their input.

Torch's copy and Inductor's kernels write single bytes.
"""

import torch

from stepgraph.kernels.operator import operator

Tensor = torch.Tensor


@operator(lambda x: x.new_empty(x.shape[::-1]), launch="fp8.transpose_triton:launch")
def transposed_bytes(x: Tensor) -> Tensor:
    """``x`` (R, C) uint8, in any strides, transposed: (C, R), contiguous."""
    return x.t().clone(memory_format=torch.contiguous_format)

"""The gradient of an embedding's table: for every row, the sum of the gradients of the positions that looked it up.

    dW_v = sum of g_i over i with index_i = v

Atomic additions, as Inductor makes, are not deterministic. Here the positions are sorted by index, as torch's own
operator sorts them, and each row is added up in a fixed order.
"""

import torch

from stepgraph.kernels.operator import operator


def reference(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int) -> torch.Tensor:
    """The gradient of the table in plain torch; arguments as in `embedding_backward`."""
    rows, index = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1)
    counts = (index >= 0) & (index < num_weights) & (index != padding_idx)
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros(num_weights, grad.shape[-1], dtype=wide, device=grad.device)
    return total.index_add_(0, index[counts], rows[counts].to(wide)).to(grad.dtype)


@operator(
    lambda grad, indices, rows, _: grad.new_empty(rows, grad.shape[-1]), launch="embedding.gradient_triton:launch"
)
def embedding_backward(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int) -> torch.Tensor:
    """The gradient of a table of ``num_weights`` rows, from the gradient of the looked-up rows: (num_weights, D),
    contiguous; rows that nothing looked up are zero. Sums are taken in a fixed order, and the host does not wait for
    the GPU.

    grad: (..., D), fp32, bf16 or fp16, on a CPU fp64 too. Added up in fp32 (fp64), and rounded once. indices: (...)
    int64 or int32: the row that each position looked up, in [0, num_weights). padding_idx: the row that gets no
    gradient; -1: every row does.
    """
    return reference(grad, indices, num_weights, padding_idx)

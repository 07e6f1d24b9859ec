"""The sum that ends a reduction by copy engines, against torch's."""

import pytest
import torch

from stepgraph.kernels.comm.copy_collectives_triton import add

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(("one", "other", "result"), [(BF16, BF16, F32), (F32, BF16, F32), (F64, F64, F64)])
@pytest.mark.parametrize(("n", "divisor"), [(5000, 1), (3, 2), (2048, 3)])
def test_add(one, other, result, n, divisor):
    """Bit for bit: one rounding of the sum, one of the quotient, each as IEEE 754 has it."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, generator=generator, dtype=F64).to(dtype) for dtype in (one, other))
    out = add(a, b, divisor, torch.empty(n, dtype=result))
    total = a.to(result) + b.to(result)
    assert torch.equal(out, total / torch.full_like(total, divisor))  # by a number, torch multiplies with its inverse

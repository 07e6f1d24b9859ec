"""GELU between products and its gradient with sums, on a GPU, where reciprocals are approximate."""

import pytest
import torch

from stepgraph.kernels.gelu_rows import gelu_rows, gelu_rows_backward
from tests.kernels.test_gelu_rows import inputs, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(4, 1024, 3072), (333, 4104), (5, 8)])
def test_gelu(shape, approximate, dtype):
    da, z = (t.cuda() for t in inputs(*shape, dtype=dtype))
    results = gelu_rows(z, approximate), *gelu_rows_backward(da, z, approximate, True)
    again = gelu_rows(z, approximate), *gelu_rows_backward(da, z, approximate, True)
    assert all(map(torch.equal, results, again))
    rounding = 2**-7 if dtype is torch.bfloat16 else 1e-5
    for found, wanted in zip(results, truth(da.cpu(), z.cpu(), approximate), strict=True):
        most = wanted.abs().max().item()
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=rounding, atol=rounding * most)

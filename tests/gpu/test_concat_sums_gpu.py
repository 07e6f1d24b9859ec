"""Gradients side by side with the sums of their rows, on a GPU."""

import pytest
import torch

from stepgraph.kernels.concat_sums import concat_sums
from tests.kernels.test_concat_sums import check, parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("widths", [(1024, 1024, 1024), (768, 128), (2048, 512, 512)])
def test_concatenation_with_sums(widths):
    given = parts((7, 300), *widths, dtype=torch.bfloat16)
    on_gpu = [part if part is None else part.cuda() for part in given]
    y, sums = concat_sums(*on_gpu)
    assert all(map(torch.equal, (y, sums), concat_sums(*on_gpu)))
    check((y.cpu(), sums.cpu()), given)

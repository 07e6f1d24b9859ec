"""Positions in a tile that are divided have no bounds that LLVM knows, so that it packs no additions to them."""

import pytest
import torch

from stepgraph.inductor import tuned_reductions


@pytest.mark.parametrize("shape, divided", [((5, 37), True), ((185,), False)])
def test_positions_that_are_divided_have_unknown_bounds(shape, divided):
    pytest.importorskip("triton")
    from tests.inductor.choices import cuda_codegen

    def function(x):
        return (torch.cat([x[1:], x[:1]]) * x).sum()

    graph = cuda_codegen.trace(function, (shape, torch.float32))["forward"]
    with cuda_codegen.rules(tuned_reductions()):
        (kernel,) = cuda_codegen.generate(graph, False).kernels
    assert "tl.sum(" in kernel.source and ("r0_index //" in kernel.source) == divided
    assert ("r0_index = 256 * tl.program_id(2) + tl.arange(0, R0_BLOCK)" in kernel.source) == divided

"""Attention written out as products and a softmax, by the kernels that take its place on a GPU."""

import pytest
import torch

import stepgraph
from stepgraph.passes import configured
from tests.gpu.test_attention_gpu import DEVICE, hopper
from tests.passes.attention.test_fuse_attention import WAYS, Model, batch_for, fused_positions, loss_of, near_to_fp64

EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
SHAPE = 2, 4, 320, 64


@hopper
@pytest.mark.parametrize("shape", [SHAPE, (2, 4, 48, 128)], ids=str)
@pytest.mark.parametrize(("write", "backend"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_as_near_to_fp64_as_eager(write, backend, shape):
    """FlexAttention's kernels are compiled, the others run as they are. Where a model calls torch's attention with a
    bias that has a gradient, torch itself takes the memory-efficient kernel on a GPU: nothing is written out."""
    torch.manual_seed(0)
    model, batch = Model(write, shape=shape).to(DEVICE), batch_for(shape=shape, device=DEVICE)
    inductor = "regional" if backend == "flex" else "off"
    step = stepgraph.capture(model, loss_of, batch, passes=configured(inductor=inductor))
    report = next(report for report in step.report if report.name == "fuse_attention")
    written = write is not fused_positions
    assert (report.matched, report.changed) == (written, written), (report.summary, report.notes)
    assert not written or f"1 by {backend}" in report.summary, (report.summary, report.notes)
    if not written:
        targets = [node.target for node in step.graph.nodes()]
        assert targets.count(EFFICIENT.default) == 1
        assert not any("softmax" in str(target) for target in targets)
    near_to_fp64(model, batch, step)

"""SwiGLU between layers with adapters: the formula's values and gradients, kernels that agree with the reference."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stepgraph.kernels.lora import gated_adapters, gated_adapters_backward
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("gated_child.py")


def operands(M, N, r, dtype=torch.float64, seed=0):
    """Those of forward, dh and dt; t_gate and t_up are columns of one matrix, as joined products leave them."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    t = made(M, 2 * r)
    return [made(M, N), made(M, N), t[:, :r], t[:, r:], made(N, r), made(N, r), made(r, N)], made(M, N), made(M, r)


def test_values_and_gradients_are_those_of_autograd():
    forward, dh, dt = operands(12, 20, 4, torch.float32)
    gate, up, t_gate, t_up, b_gate, b_up, a = leaves = [x.clone().requires_grad_() for x in forward]
    h = F.silu(gate + 2.0 * t_gate @ b_gate.t()) * (up + 0.5 * t_up @ b_up.t())
    t = h @ a.t()
    found = gated_adapters(*forward, 2.0, 0.5)
    expected = torch.autograd.grad((h, t), leaves, (dh, dt))
    *others, last = forward
    grads = gated_adapters_backward(dh, *others, dt, last, 2.0, 0.5)
    for mine, right in zip((*found, *grads), (h, t, *expected), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, right.detach(), rtol=1e-4, atol=1e-4)


def test_operators_follow_their_schemas():
    forward, dh, dt = operands(16, 32, 8, torch.bfloat16)
    *others, a = forward
    torch.library.opcheck(torch.ops.stepgraph.gated_adapters.default, (*forward, 2.0, 1.0))
    arguments = (dh, *others, dt, a, 2.0, 1.0)
    torch.library.opcheck(torch.ops.stepgraph.gated_adapters_backward.default, arguments)


@pytest.mark.slow
def test_kernels_agree_with_the_reference(tmp_path):
    """In whole tiles and parts of one, and ranks that are padded."""
    pytest.importorskip("triton")
    cases = []
    for M, N, r in ((64, 64, 16), (33, 40, 8), (70, 50, 32), (20, 24, 3)):
        forward, dh, dt = operands(M, N, r, torch.float32, seed=M)
        cases.append((*forward, dh, dt, (2.0, 0.5)))
    for (*forward, dh, dt, scales), found in zip(cases, interpreted(CHILD, tmp_path, cases), strict=True):
        *others, a = forward
        right = (*gated_adapters(*forward, *scales), *gated_adapters_backward(dh, *others, dt, a, *scales))
        for mine, theirs in zip(found, right, strict=True):
            assert mine.shape == theirs.shape and mine.is_contiguous()
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 32])
def test_no_configuration_spills(rank):
    kernels = pytest.importorskip("stepgraph.kernels.lora.gated_triton")
    data = ["gate", "up", "t_gate", "t_up", "b_gate", "b_up", "a", "h", "dh", "dt", "d_gate", "d_up"]
    parts = {"parts": "*fp32", "row_parts": "*bf16", "column_parts": "*fp32"}
    sizes = dict.fromkeys(("M", "N", "rank", "gate_stride", "up_stride"), "i32")
    kinds = dict.fromkeys(data, "*bf16") | parts | sizes | dict.fromkeys(("scale_gate", "scale_up"), "fp32")
    for kernel, (tall, wide, *_, warps), last in (
        (kernels._forward_kernel, kernels.FORWARD, {"COLUMNS": kernels.FORWARD[2]}),
        (kernels._backward_kernel, kernels.BACKWARD, {"ROWS": kernels.BACKWARD[2], "STAGES": kernels.BACKWARD[3]}),
    ):
        constants = {"RANK": rank, "TALL": tall, "WIDE": wide} | last
        own = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
        aligned = [name for name, kind in own.items() if kind != "fp32"]
        assert_no_spills(kernel, own, constants, warps, aligned)

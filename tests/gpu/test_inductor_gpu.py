"""Inductor under stepgraph's rules on a GPU: right gradients, with and where without them."""

import pytest
import torch
import torch.nn.functional as F

from stepgraph import compat
from stepgraph.inductor import fusion_guard, tuned_reductions

DEVICE = "cuda"
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def modulated(x, table):
    scale1, shift1, scale2, shift2 = table.chunk(4, dim=1)
    x = F.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2


def table_gradient(function, poison=True):
    torch.manual_seed(0)
    x = torch.randn(1, 65536, 1024, device=DEVICE)
    table = (0.1 * torch.randn(1, 4, 1024, device=DEVICE)).requires_grad_()
    gradient = torch.randn_like(x)
    out = function(x, table)
    if poison:  # what the allocator hands out next is not by chance what is right
        blocks = [torch.full((4096,), torch.nan, device=DEVICE) for _ in range(64)]
        del blocks
    out.backward(gradient)
    return table.grad


@pytest.mark.skipif(compat.TORCH >= (2, 15), reason="pytorch issue 193061 is in 2.10 to 2.14")
def test_gradient_of_a_table_of_slices_is_wrong_without_the_guard():
    expected = table_gradient(modulated)
    wrong = table_gradient(torch.compile(modulated))
    assert not torch.allclose(wrong, expected, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("scope", [fusion_guard, lambda: fusion_guard() | tuned_reductions()], ids=["guard", "both"])
def test_gradient_of_a_table_of_slices_is_right_with_the_guard(scope):
    right = table_gradient(torch.compile(modulated, options=scope().options))
    torch.testing.assert_close(right, table_gradient(modulated), rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "rows, columns",
    [(65536, 256), (65537, 256), (20000, 768), (16384, 1024), (8192, 2880), (16384, 4096), (4096, 8192), (4096, 16384)],
)
def test_tuned_norms_are_right(kind, rows, columns):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=DEVICE, dtype=BF16).requires_grad_()
    weights = [torch.randn(columns, device=DEVICE, dtype=BF16).requires_grad_() for _ in range(1 + (kind == "layer"))]
    dy = torch.randn(rows, columns, device=DEVICE, dtype=BF16)

    def norm(x, *weights):
        return F.rms_norm(x, (columns,), *weights, eps=1e-6) if kind == "rms" else F.layer_norm(x, (columns,), *weights)

    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    expected_y = norm(*wide)
    expected = torch.autograd.grad(expected_y, wide, dy.double())
    with fusion_guard() | tuned_reductions():
        y = torch.compile(norm, dynamic=False)(x, *weights)
    got = torch.autograd.grad(y, (x, *weights), dy)
    for actual, right in zip((y, *got), (expected_y, *expected), strict=True):
        error = (actual.double() - right).norm() / right.norm()
        assert error < 4e-3  # bfloat16 rounds to within 2^-9 of a value
    again = torch.autograd.grad(torch.compile(norm, dynamic=False)(x, *weights), (x, *weights), dy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("rows, columns", [(1, 1), (131, 4096), (1024, 256), (1056, 64), (264, 2048), (100, 16384)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_column_sum(rows, columns, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=DEVICE)
    total = torch.ops.stepgraph.column_sum(x, dtype)
    expected = x.double().sum(0)
    assert total.dtype == dtype and torch.equal(total, torch.ops.stepgraph.column_sum(x, dtype))
    bound = x.double().abs().sum(0) * 2**-20 + (expected.abs() * 2**-8 if dtype == BF16 else 0)
    assert ((total.double() - expected).abs() <= bound).all()


def test_fused_norm_backward_is_one_kernel_over_the_data():
    guard = fusion_guard()
    x = torch.randn(16384, 4096, device=DEVICE, dtype=BF16, requires_grad=True)
    w = torch.randn(4096, device=DEVICE, dtype=BF16, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True), guard | tuned_reductions():
        y = torch.compile(lambda x, w: F.rms_norm(x, (4096,), w), dynamic=False)(x, w)
    y.backward(torch.ones_like(y))
    (kernel,) = guard.report.allowed()
    assert kernel.backward and len(kernel.loads.full) == 2
    assert guard.report.refused() == []

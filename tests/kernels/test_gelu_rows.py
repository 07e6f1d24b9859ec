"""GELU and its gradient with sums of rows: operators, kernels interpreted against float64, and their registers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stepgraph.kernels.gelu_rows import gelu_rows, gelu_rows_backward
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("gelu_child.py")
BF16, FP32 = torch.bfloat16, torch.float32


def inputs(*shape, dtype=FP32):
    generator = torch.Generator().manual_seed(sum(shape))
    return [(2 * torch.randn(*shape, generator=generator)).to(dtype) for _ in range(2)]


def truth(da, z, approximate):
    """GELU, its gradient and the sum of its rows in float64."""
    x = z.double().requires_grad_()
    a = F.gelu(x, approximate=approximate)
    a.backward(da.double())
    return a.detach(), x.grad, x.grad.reshape(-1, x.shape[-1]).sum(0)


def check(a, dz, db, da, z, approximate):
    expected = truth(da, z, approximate)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if z.dtype == FP32 else {"rtol": 2**-7, "atol": 1e-6}
    for found, wanted in ((a, expected[0]), (dz, expected[1])):
        assert found.dtype == z.dtype and found.shape == z.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), wanted, **tolerance)
    assert db.dtype == z.dtype and db.shape == z.shape[-1:]
    rows = z.numel() // z.shape[-1]
    torch.testing.assert_close(
        db.double(), expected[2], rtol=1e-5 if z.dtype == FP32 else 2**-7, atol=1e-5 * rows if z.dtype == FP32 else 0.05
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_operators(approximate, dtype):
    da, z = inputs(3, 7, 24, dtype=dtype)
    dz, db = gelu_rows_backward(da, z, approximate, True)
    check(gelu_rows(z, approximate), dz, db, da, z, approximate)
    alone, none = gelu_rows_backward(da, z, approximate, False)
    assert torch.equal(alone, dz) and none.shape == (0,)
    for function, given in ((gelu_rows, (z, approximate)), (gelu_rows_backward, (da, z, approximate, True))):
        torch.library.opcheck(function, given)
    torch.library.opcheck(gelu_rows_backward, (da, z, approximate, False))


def test_what_is_refused():
    da, z = inputs(4, 8)
    for arguments in ((z, "erf"), (z.long(), "none")):
        with pytest.raises(ValueError, match="allowed"):
            gelu_rows(*arguments)
    for arguments in ((da[:2], z, "none", True), (da.double(), z, "none", True), (da, z, "erf", True)):
        with pytest.raises(ValueError, match="allowed"):
            gelu_rows_backward(*arguments)


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    """Rows and columns that fill no tile, several programs over rows, and every size of number. The interpreter cuts
    off what a store to bfloat16 should round."""
    shapes = [((5, 40), FP32), ((2, 37, 264), FP32), ((131, 8), FP32), ((70, 300), BF16)]
    cases = [(*inputs(*shape, dtype=dtype), kind) for shape, dtype in shapes for kind in ("none", "tanh")]
    extremes = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 4.0, -4.0, 9.0, -9.0, 30.0, -30.0, 1e5, -1e5, 1e18, -1e18]])
    cases += [(torch.ones_like(extremes), extremes, kind) for kind in ("none", "tanh")]
    forward = [(z, kind) for _, z, kind in cases]
    backward = [(da, z, kind, sums) for da, z, kind in cases for sums in (True, False)]
    results = interpreted(CHILD, tmp_path, forward + backward)
    for i, (da, z, kind) in enumerate(cases):
        (dz, db), (alone, none) = results[len(cases) + 2 * i : len(cases) + 2 * i + 2]
        assert torch.equal(alone, dz) and not none.numel()
        check(results[i], dz, db, da, z, kind)


@pytest.mark.slow
@pytest.mark.parametrize("tanh", [False, True])
def test_kernels_do_not_spill(tanh):
    pytest.importorskip("triton")
    from stepgraph.kernels import gelu_rows_triton as own

    constants = {"TANH": tanh, "FAST": True}
    forward = {"z": "*bf16", "a": "*bf16", "count": "i32"}
    assert_no_spills(own._gelu_kernel, forward, {**constants, "BLOCK": own.BLOCK}, own.WARPS, forward)
    backward = dict.fromkeys(("da", "z", "dz"), "*bf16") | {"partials": "*fp32", "M": "i32", "rows": "i32"}
    constants |= {"N": 3072, "ROWS": own.ROWS, "WIDTH": own.WIDTH, "STAGES": own.STAGES}
    ptx = assert_no_spills(own._gelu_backward_kernel, backward, constants, own.WARPS_BACKWARD, backward)
    assert "rcp.approx.ftz.f32" in ptx and "ex2.approx" in ptx

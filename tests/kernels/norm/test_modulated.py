"""The backward of layer norms that sequences scale and shift: operators, kernels interpreted, and their registers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stepgraph.kernels.norm.modulated import WIDEST, gated_norm_backward, modulated_norm_backward
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("modulated_child.py")
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


def inputs(B, T, N, *, gated=True, stream=True, dtype=FP32, offset=1.0, packed=True):
    """The operators' arguments, and autograd's gradients of the same formula in float64. ``packed``: scale and gate are
    slices of one tensor, as conditions are."""
    generator = torch.Generator().manual_seed(B * T + N)

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    residual, branch, dy, dh = (made(B, T, N) for _ in range(4))
    condition = made(B, 1, 3 * N)
    scale, gate = (condition[..., i * N : (i + 1) * N] for i in (0, 2))
    if not packed:
        scale, gate = scale.contiguous(), gate.contiguous()
    wide = [t.double().requires_grad_() for t in (residual, branch, scale, gate, made(B, 1, N))]
    if gated:
        x = wide[0] + wide[3] * wide[1]
    else:
        x = wide[0] * 1.0
    x.retain_grad()
    y = F.layer_norm(x, (N,), eps=EPS) * (wide[2] + offset) + wide[4]
    (y * dy.double()).sum().add((x * dh.double()).sum() if stream else 0).backward()
    rows = x.detach().to(dtype)
    stats = rows.double()
    mean = stats.mean(-1, keepdim=True)
    rstd = (stats.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    given = (dy, rows, mean.float(), rstd.float(), scale, offset, dh if stream else None)
    expected = [x.grad, wide[2].grad, wide[4].grad]
    if gated:
        return (*given, branch, gate), [*expected, wide[1].grad, wide[3].grad, wide[1].grad.sum((0, 1))]
    return given, expected


def check(results, expected, like, dtype=FP32):
    assert len(results) == len(expected)
    for found, wanted in zip(results, expected, strict=True):
        assert found.shape == wanted.shape and found.is_contiguous() and found.dtype == dtype
        tolerance = {"rtol": 2e-5, "atol": 2e-4} if dtype == FP32 else {"rtol": 2e-2, "atol": 6e-2}
        torch.testing.assert_close(found.double(), wanted, **tolerance)
    assert results[0].shape == like.shape


CASES = [
    (2, 5, 16, {}),
    (1, 7, 33, {"gated": False}),
    (3, 4, 24, {"stream": False, "offset": 0.0}),
    (2, 40, 64, {"gated": False, "stream": False, "packed": False}),
    (5, 1, 8, {"dtype": BF16}),
]


@pytest.mark.parametrize("B, T, N, options", CASES, ids=str)
def test_operators_have_autograds_gradients(B, T, N, options):
    given, expected = inputs(B, T, N, **options)
    run = gated_norm_backward if len(given) > 7 else modulated_norm_backward
    check(run(*given), expected, given[1], options.get("dtype", FP32))


def test_float64():
    given, expected = inputs(2, 6, 16)
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in given]
    found = gated_norm_backward(*wide)
    assert all(t.dtype == torch.float64 for t in found)
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_opcheck():
    for options in ({}, {"stream": False}):
        torch.library.opcheck(gated_norm_backward, inputs(2, 3, 16, **options)[0])
        torch.library.opcheck(modulated_norm_backward, inputs(2, 3, 16, gated=False, **options)[0])


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    """Sequences in one part and several, the last one shorter; rows that fill no tile."""
    cases = [*CASES, (1, 131, 40, {}), (2, 70, 96, {"gated": False}), (9, 33, 64, {"dtype": BF16})]
    found = [inputs(B, T, N, **options) for B, T, N, options in cases]
    results = interpreted(CHILD, tmp_path, [given for given, _ in found])
    for result, (given, expected), (*_, options) in zip(results, found, cases, strict=True):
        check(result, expected, given[1], options.get("dtype", FP32))


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("N, dtype", [(1024, "bf16"), (1152, "bf16"), (3072, "bf16"), (WIDEST, "bf16"), (3072, "fp32")])
def test_kernels_do_not_spill(N, dtype, gated):
    pytest.importorskip("triton")
    from stepgraph.kernels.norm import modulated_triton as own

    rows, block, warps = own.tile_of(N, 2 if dtype == "bf16" else 4)
    tensors = ["dy", "x", "scale", "dh", "dx", *(["branch", "gate", "dbranch"] if gated else [])]
    kinds = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(("mean", "rstd", "partials"), "*fp32")
    kinds |= dict.fromkeys(("T", "tokens", "parts", "scale_stride", "gate_stride"), "i32") | {"offset": "fp32"}
    constants = {"N": N, "ROWS": rows, "BLOCK": block, "STAGES": own.STAGES}
    if not gated:
        constants |= dict.fromkeys(("branch", "gate", "dbranch"))
    aligned = [name for name in kinds if name != "offset"]
    ptx = assert_no_spills(own._backward_kernel, kinds, constants, warps, aligned)
    assert "cp.async" in ptx  # the loads of later rows are in flight
    kinds = dict.fromkeys(("dscale", "dshift", "dgate", "dbias"), f"*{dtype}") | {
        "partials": "*fp32",
        "parts": "i32",
        "N": "i32",
    }
    assert_no_spills(own._add_kernel, kinds, {"AT_ONCE": own.AT_ONCE, "WIDTH": own.WIDTH}, 2, ["partials", "N"])

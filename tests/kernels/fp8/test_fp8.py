"""Casts to fp8 and their products: nearest values, documented scales, kernels with the reference's bits."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.fp8 import cast_scaled, cast_scaled_rows, scaled_product, transposed_bytes
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("fp8_child.py")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = {E4M3: 448.0, E5M2: 57344.0}
INF = float("inf")
both = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def amax_of(x):
    return torch.linalg.vector_norm(x, INF, dtype=torch.float32)


def matrix(rows, columns, seed=0, dtype=torch.bfloat16):
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, columns, generator=generator).mul(20).sub(17).exp2()
    return (torch.randn(rows, columns, generator=generator) * spread).to(dtype)


def nearest(value, dtype):
    """What ``value`` (fp32) is in fp8, found among all 256 numbers: the nearest, of two the one whose code is even."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    finite = numbers.isfinite()
    codes, numbers = codes[finite], numbers[finite]
    apart = (value.double().flatten().unsqueeze(1) - numbers).abs()
    ties = apart == apart.amin(1, keepdim=True)
    odd = (codes & 1).double() + 2 * (numbers.signbit() != value.flatten().signbit().unsqueeze(1))
    return numbers[torch.where(ties, odd, 9.0).argmin(1)].view(value.shape)


@both
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), seed=st.integers(0, 999), wide=st.booleans())
def test_values_are_the_nearest_and_scales_those_of_the_largest(dtype, rows, columns, seed, wide):
    x = matrix(rows, columns, seed, torch.float32 if wide else torch.bfloat16)
    most = MOST[dtype]
    scale, q, transposed = cast_scaled(x, amax_of(x), dtype, True, True)
    top = x.float().abs().amax()
    assert scale == top / most
    assert torch.equal(q.double(), nearest((x.float() * (torch.tensor(most) / top)).clamp(-most, most), dtype))
    assert torch.equal(transposed.float(), q.float().t()) and transposed.is_contiguous()
    q, row_scale, transposed, column_scale = cast_scaled_rows(x, dtype, True, True)
    for side, found, scales in ((x, q, row_scale), (x.t(), transposed, column_scale)):
        tops = side.float().abs().amax(1)
        assert torch.equal(scales, tops / most)
        factor = torch.full_like(tops, most) / tops
        expected = nearest((side.float() * factor[:, None]).clamp(-most, most), dtype)
        assert torch.equal(found.double(), expected) and found.is_contiguous()
        assert (found.double().abs().amax(1) == most).all()  # the whole range is used


@both
def test_zeros_tiny_values_and_what_is_not_finite(dtype):
    x = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [3e38, 1.0], [float("nan"), 1.0], [INF, 1.0]])
    q, scale, _, _ = cast_scaled_rows(x, dtype, True, False)
    y = q.float() * scale[:, None]
    assert torch.equal(q[0].float(), torch.zeros(2)) and scale[0] > 0
    assert (y[1].abs() <= 1e-30).all() and scale[:3].isfinite().all()
    torch.testing.assert_close(y[2, 0], torch.tensor(3e38))
    assert y[3].isnan().all() and y[4].isnan().all()
    assert cast_scaled(x, amax_of(x), dtype, True, False)[0].isnan()


def test_columns_are_multiplied_before_they_are_cast():
    x, by = matrix(6, 32), torch.rand(32) + 0.5
    for found, right in zip(
        cast_scaled_rows(x, E4M3, True, True, by), cast_scaled_rows(x.float() * by, E4M3, True, True), strict=True
    ):
        assert torch.equal(found.float(), right.float())


def test_what_is_not_asked_for_is_empty():
    x = matrix(4, 8)
    _, q, transposed = cast_scaled(x, amax_of(x), E4M3, False, True)
    assert q.shape == (0,) and transposed.shape == (8, 4)
    q, row_scale, transposed, column_scale = cast_scaled_rows(x, E4M3, True, False)
    assert q.shape == (4, 8) and row_scale.shape == (4,) and transposed.shape == column_scale.shape == (0,)


@pytest.mark.parametrize("forms", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_product_of_the_values_that_were_cast(forms, rowwise, biased):
    a, b = matrix(5, 32), matrix(7, 32, seed=1)
    bias = torch.randn(7).bfloat16() if biased else None
    if rowwise:
        (qa, sa, _, _), (qb, sb, _, _) = (
            cast_scaled_rows(x, f, True, False) for x, f in zip((a, b), forms, strict=True)
        )
        wide_a, wide_b = qa.double() * sa[:, None], qb.double() * sb[:, None]
    else:
        (sa, qa, _), (sb, qb, _) = (
            cast_scaled(x, amax_of(x), f, True, False) for x, f in zip((a, b), forms, strict=True)
        )
        wide_a, wide_b = qa.double() * sa, qb.double() * sb
    y = scaled_product(qa, qb, sa, sb, bias, True)
    expected = wide_a @ wide_b.t() + (0 if bias is None else bias.double())
    assert y.dtype == torch.bfloat16 and y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)


def test_operators_follow_their_schemas():
    x = matrix(16, 32)
    scale, q, _ = cast_scaled(x, amax_of(x), E4M3, True, True)
    row, row_scale, _, _ = cast_scaled_rows(x, E4M3, True, False)
    ops = torch.ops.stepgraph
    for op, args in (
        (ops.cast_scaled, (x.t(), amax_of(x), E5M2, True, True)),
        (ops.cast_scaled_rows, (x[::2], E4M3, False, True)),
        (ops.cast_scaled_rows, (x, E4M3, True, False, torch.ones(32))),
        (ops.transposed_bytes, (row.view(torch.uint8)[::2],)),
        (ops.scaled_product, (q, q, scale, scale, None, False)),
        (ops.scaled_product, (row, row, row_scale, row_scale, torch.ones(16).bfloat16(), True)),
    ):
        # The check that inputs are not written cannot compare fp8 tensors.
        torch.library.opcheck(op.default, args, test_utils="test_faketensor")


# The kernels


def exact(rows, columns, dtype):
    """Numbers of ``dtype`` times 2^-9, the largest in every row and column: what the interpreter, which rounds in its
    own way, has nothing to round in."""
    generator = torch.Generator().manual_seed(rows)
    bits, low, high = {E4M3: (3, -6, 8), E5M2: (2, -14, 15)}[dtype]
    digits = torch.randint(2**bits, (rows, columns), generator=generator) / 2**bits + 1
    x = digits * torch.randint(low, high, (rows, columns), generator=generator).float().exp2()
    x *= torch.randint(2, (rows, columns), generator=generator) * 2 - 1
    i = torch.arange(max(rows, columns))
    x[i % rows, i % columns] = -MOST[dtype]
    return (x * 2**-9).bfloat16()


@pytest.mark.slow
def test_kernels_give_the_reference_bits(tmp_path):
    """Of whole tiles and parts of one, rows of one kernel and of two, transposed and sliced inputs; of values that
    must be rounded the scales alone."""
    pytest.importorskip("triton")
    odd, rough = matrix(34, 5), matrix(30, 20)
    odd[3, 2], odd[7, 1], odd[9] = float("nan"), INF, 0.0
    cases = [
        (exact(3, 200, E4M3), E4M3, True, False, 16384, None),
        (exact(3, 200, E5M2), E5M2, True, False, 100, None),  # rows that one program does not hold
        (exact(13, 5, E4M3), E4M3, True, True, 16384, None),
        (exact(34, 10, E5M2).t(), E5M2, True, True, 16384, None),
        (exact(10, 80, E4M3)[:, ::2], E4M3, False, True, 16384, None),
        (exact(12, 34, E4M3).float(), E4M3, True, True, 16384, None),
        (exact(10, 35, E4M3)[:, 1:], E4M3, True, True, 16384, None),
        (exact(34, 38, E4M3), E4M3, True, True, 16384, None),
        (odd, E4M3, True, True, 16384, None),
        (odd[:12, 1:], E4M3, True, True, 16384, None),
        (odd[:12].repeat(1, 2), E5M2, True, True, 16384, None),
        (rough, E5M2, True, True, 16384, None),
        (exact(3, 200, E4M3), E4M3, True, False, 16384, torch.randint(1, 3, (200,)).float()),
        (exact(3, 200, E4M3), E4M3, True, False, 100, torch.randint(1, 3, (200,)).float()),
        (exact(34, 10, E4M3), E4M3, True, True, 16384, torch.full((10,), 0.5)),
    ]
    for case, casts in zip(cases, interpreted(CHILD, tmp_path, cases), strict=True):
        x, dtype, rows, columns, _, by = case
        is_exact = x.isfinite().all() and x is not rough and by is None
        whole, rowwise = cast_scaled(x, amax_of(x), dtype, rows, columns), cast_scaled_rows(*case[:4], by)
        for found, right in zip(casts, (whole, rowwise) * 2, strict=True):
            for mine, theirs in zip(found, right, strict=True):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                if mine.dtype == torch.float32 or is_exact:
                    torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
                elif by is not None:  # a step of fp8
                    torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.slow
def test_the_kernel_transposes_bytes(tmp_path):
    """Of whole tiles and parts of one, odd sizes, views and what begins between two pairs."""
    pytest.importorskip("triton")
    x = torch.randint(256, (70, 102), dtype=torch.uint8)
    cases = [(x,), (x[:64, :64].contiguous(),), (x[:33],), (x[:, :37].contiguous(),), (x.t(),), (x[1:, ::2],)]
    cases.append((x.flatten()[1:5101].view(50, 102),))
    for (side,), found in zip(cases, interpreted(CHILD, tmp_path, cases), strict=True):
        assert torch.equal(found, side.t()) and found.is_contiguous()
        assert torch.equal(transposed_bytes(side), found)


@pytest.mark.slow
@pytest.mark.parametrize("element", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
@pytest.mark.parametrize("to", ["fp8e4nv", pytest.param("fp8e5", marks=pytest.mark.long)])
def test_no_configuration_spills(element, to):
    kernels = pytest.importorskip("stepgraph.kernels.fp8.cast_triton")
    most = {"fp8e4nv": 448.0, "fp8e5": 57344.0}[to]
    sizes = {"R": "i32", "C": "i32", "row_stride": "i32"}
    bits = {"row_bits": "*i32", "column_bits": "*i32"}
    results = {"q": f"*{to}", "transposed": f"*{to}", "row_scale": "*fp32", "column_scale": "*fp32"}
    forms = {"ROWS": True, "COLUMNS": True, "TILE": kernels.TILE, "column_stride": 1}
    aligned = ("x", "q", "transposed", "R", "C", "row_stride")
    x = {"x": f"*{element}"}
    if kernels._transposed_before(torch.empty(1, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[element])):
        forms["COLUMNS"] = False
    assert_no_spills(kernels._amax_kernel, x | bits | sizes, forms, kernels.WARPS, aligned)
    if element == "bf16":
        pairs = {"ROWS": True, "TILE": kernels.PAIRS_ROWS, "PAIRS": kernels.PAIRS, "STAGES": kernels.PAIRS_STAGES}
        kinds = {"x": "*i32", "CHUNK": "i32"} | bits | sizes
        assert_no_spills(kernels._amax_pairs_kernel, kinds, pairs, kernels.PAIRS_WARPS, (*kinds,))
    del forms["TILE"]
    forms |= {"TALL": kernels.CAST_TALL, "WIDE": kernels.CAST_WIDE}
    kinds, constants = x | bits | results | sizes, forms | {"WHOLE": False, "MOST": most}
    assert_no_spills(kernels._cast_kernel, kinds, constants, kernels.CAST_WARPS, aligned)
    whole = x | {"row_bits": "*i32", "row_scale": "*fp32"} | results | sizes
    nothing = {"column_bits": None, "column_scale": None}
    kinds = {name: kind for name, kind in whole.items() if name not in nothing}
    constants = forms | nothing | {"WHOLE": True, "MOST": most}
    assert_no_spills(kernels._cast_kernel, kinds, constants, kernels.CAST_WARPS, aligned)
    for C in (256, 4096, kernels.LONGEST):
        block, warps = kernels.row_configuration(C)
        kinds = x | {"q": f"*{to}", "scale": "*fp32", "C": "i32", "row_stride": "i32", "q_stride": "i32"}
        constants = {"column_stride": 1, "scale_stride": 1, "MOST": most, "BLOCK": block}
        assert_no_spills(kernels._row_kernel, kinds, constants | {"by": None}, warps, aligned)
        assert_no_spills(kernels._row_kernel, kinds | {"by": "*fp32"}, constants, warps, aligned)

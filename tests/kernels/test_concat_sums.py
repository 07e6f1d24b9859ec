"""Concatenation with sums of rows: the operator, the kernel interpreted, and its registers."""

from pathlib import Path

import pytest
import torch

from stepgraph.kernels.concat_sums import WIDTH, concat_sums
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("concat_child.py")
BF16, FP32 = torch.bfloat16, torch.float32


def parts(rows, *widths, dtype=FP32):
    generator = torch.Generator().manual_seed(sum(rows) + len(widths))
    made = [torch.randn(*rows, width, generator=generator).to(dtype) for width in widths]
    return (*made, *[None] * (3 - len(made)))


def check(found, given):
    y, sums = found
    expected = torch.cat([part for part in given if part is not None], -1)
    assert torch.equal(y, expected) and y.is_contiguous()
    rows = expected.double().reshape(-1, y.shape[-1])
    assert sums.dtype == y.dtype and sums.shape == y.shape[-1:]
    tolerance = {"rtol": 2**-7, "atol": 2**-5} if y.dtype == BF16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(sums.double(), rows.sum(0), **tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("widths", [(3, 5), (8, 2, 2)])
def test_operator(widths, dtype):
    given = parts((4, 6), *widths, dtype=dtype)
    check(concat_sums(*given), given)
    torch.library.opcheck(concat_sums, given)


def test_what_is_refused():
    a, b, _ = parts((4, 6), 8, 8)
    for given in ((a, b[:2], None), (a, b.double(), None), (a.long(), b.long(), None), (a[0, 0], b[0, 0], None)):
        with pytest.raises(ValueError, match=r"concat_sums got .*; allowed are"):
            concat_sums(*given)


@pytest.mark.slow
def test_kernel_interpreted(tmp_path):
    """Two and three parts, of several blocks of columns, and programs that share the rows."""
    cases = [
        parts((5, 9), WIDTH, WIDTH), parts((3, 61), 2 * WIDTH, WIDTH, WIDTH), parts((700,), WIDTH, WIDTH, WIDTH),
        parts((33,), WIDTH, 2 * WIDTH, dtype=BF16),
    ]  # fmt: skip
    for found, given in zip(interpreted(CHILD, tmp_path, cases), cases, strict=True):
        check(found, given)


@pytest.mark.slow
@pytest.mark.parametrize("three", [True, False])
def test_kernel_does_not_spill(three):
    pytest.importorskip("triton")
    from stepgraph.kernels import concat_sums_triton as own

    kinds = dict.fromkeys(("a", "b", *["c"] * three, "y"), "*bf16") | {"partials": "*fp32", "M": "i32", "rows": "i32"}
    constants = {"NA": 1024, "NB": 1024, "NC": 1024 * three, "ROWS": own.ROWS, "WIDTH": WIDTH, "STAGES": own.STAGES}
    if not three:
        constants["c"] = None
    assert "cp.async" in assert_no_spills(own._concat_kernel, kinds, constants, own.WARPS, kinds)

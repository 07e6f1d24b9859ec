"""Products with the own transpose: the operator, and its kernel interpreted and compiled."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepgraph.kernels.gram import TILE, gram
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("gram_child.py")
BF16, FP32 = torch.bfloat16, torch.float32


def cases():
    """x of one tile and of several, of tiles that M and N fill or do not, of both orders in memory, alone and stacked;
    with something added and without."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((40, 24), (256, 64), (300, 70), (2, 260, 130), (3, 128, 128)):
        for turned in (False, True):
            form = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
            x = torch.randn(form, generator=generator) / shape[-1] ** 0.5
            x = x.mT if turned else x
            yield x, None, 0.0, 1.0
            yield x, x @ x.mT, -4.775, 2.0315


def expected(x, added, beta, alpha):
    found = alpha * (x.double() @ x.double().mT)
    return found if added is None else found + beta * added.double()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_operator(dtype):
    for x, added, *factors in cases():
        given = (x.to(dtype), None if added is None else added.to(dtype), *factors)
        found = gram(*given)
        assert found.dtype == dtype and found.is_contiguous()
        tolerance = 1e-5 if dtype == FP32 else 0.04
        torch.testing.assert_close(found.double(), expected(*given), rtol=tolerance, atol=tolerance)
        torch.library.opcheck(gram, given)


def test_work_is_that_of_the_tiles_on_and_below_the_diagonal():
    x = torch.randn(2, 4 * TILE, 8, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.stepgraph.gram(x, None, 0.0, 1.0)
    assert counter.get_total_flops() == 2 * 10 * (2 * TILE * TILE * 8)


def test_what_is_refused():
    x = torch.randn(4, 8)
    for given in ((x[0], None), (x.long(), None), (x, x), (x, torch.randn(4, 4, dtype=BF16))):
        with pytest.raises(ValueError, match="allowed"):
            gram(*given, 1.0, 1.0)


@pytest.mark.slow
def test_kernel_interpreted(tmp_path):
    given = list(cases())
    for found, (x, *rest) in zip(interpreted(CHILD, tmp_path, given), given, strict=True):
        torch.testing.assert_close(found.double(), expected(x, *rest), rtol=1e-5, atol=1e-5)
        assert found.is_contiguous() and torch.equal(found[..., TILE:, :TILE], found.mT[..., TILE:, :TILE])


@pytest.mark.slow
@pytest.mark.parametrize("adds", [False, True])
def test_kernel_does_not_spill(adds):
    pytest.importorskip("triton")
    from stepgraph.kernels import gram_triton as own

    kinds = dict.fromkeys(("x", "out", *["added"] * adds), "*bf16") | dict.fromkeys(("beta", "alpha"), "fp32")
    kinds |= dict.fromkeys(("M", "N", "X_BATCH", "X_ROW"), "i32")
    constants = {"X_COLUMN": 1, "FULL": True, "TILE": TILE, "STEP": own.STEP, "STAGES": 4}
    constants |= {} if adds else {"added": None}
    aligned = [name for name, kind in kinds.items() if kind != "fp32"]
    assert "wgmma" in assert_no_spills(own._gram_kernel, kinds, constants, own.WARPS, aligned)

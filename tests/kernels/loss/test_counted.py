"""A head's products over the rows that count, which come first: operators, kernels interpreted and compiled."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from stepgraph.kernels.loss import counted
from stepgraph.kernels.loss.cross_entropy import cross_entropy_
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("counted_child.py")
BF16, FP32 = torch.bfloat16, torch.float32
#: Tiles of the interpreter: as many edges as real ones have.
SMALL = {"rows": 32, "columns": 64, "step": 16}


def case(rows, D, V, count, first, dtype=FP32, biased=True, tile=SMALL):
    """Rows ``first`` to ``first + rows`` of those whose first ``count`` count."""
    generator = torch.Generator().manual_seed(rows + V)

    def random(*shape):
        return (torch.randn(shape, generator=generator) / 4).to(dtype)

    x, weight, bias = random(rows, D), random(V, D).t(), random(V) if biased else None
    targets = torch.randint(V, (rows,), generator=generator)
    targets[max(count - first, 0) :] = -100
    return x, weight, bias, targets, random(V, D), torch.tensor(count, dtype=torch.int32), first, tile


def expected(x, weight, bias, targets, total, end, first, _):
    """(logits, loss, their gradient, dx, dw added to ``total``, dw, db) in float64, of all rows."""
    x, weight, bias, total = (None if t is None else t.double() for t in (x, weight, bias, total))
    logits = x @ weight if bias is None else torch.addmm(bias, x, weight)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    (slopes,) = torch.autograd.grad(loss * 0.5, logits)
    dw = slopes.t() @ x
    return logits.detach(), loss.detach(), slopes, slopes @ weight.t(), total + dw, dw, slopes.sum(0)


def check(found, given, tolerance):
    """What is ``found`` for rows that count and summed over them; that rows up to a block's end have no slope."""
    rows, count = len(given[0]), max(min(int(given[5]) - given[6], len(given[0])), 0)
    used = min(-(-count // counted.BLOCK) * counted.BLOCK, rows)
    for i, (mine, truth) in enumerate(zip(found, expected(*given), strict=True)):
        if i in (0, 2, 6):  # to a multiple of columns with zeros
            wide = F.pad(truth, (0, counted.padded(truth.shape[-1]) - truth.shape[-1]))
            assert mine.shape == wide.shape
            truth = wide
        if i in (0, 2, 3):
            mine, truth = mine[:used], truth[:used]
        torch.testing.assert_close(mine.double(), truth, rtol=tolerance, atol=tolerance)
    assert not found[2][count:used].any()


def by_operators(x, weight, bias, targets, total, end, first, _):
    logits = counted.counted_logits(x, weight, bias, end, first)
    before = logits.clone()
    loss = cross_entropy_(logits[:, : weight.shape[1]], targets, torch.tensor(0.5), False, -100, True)
    added, fresh = total.clone(), torch.full_like(total, torch.nan)
    counted.counted_dw_(added, logits, x, end, first, True)
    counted.counted_dw_(fresh, logits, x, end, first, False)
    dx, db = counted.counted_dx(logits, weight.t(), end, first), counted.counted_db(logits, end, first)
    return before, loss, logits, dx, added, fresh, db


CASES = [
    (40, 24, 50, 0, 0), (40, 24, 50, 40, 0), (300, 32, 70, 129, 0), (300, 48, 300, 77, 128), (150, 16, 129, 400, 200),
    (150, 16, 129, 100, 128),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", CASES)
def test_operators(shape, biased, dtype):
    given = case(*shape, dtype, biased)
    check(by_operators(*given), given, 1e-5 if dtype == FP32 else 0.05)


def test_opcheck():
    x, weight, bias, _, total, end, first, _ = case(40, 24, 50, 17, 0)
    slopes = F.pad(torch.randn(40, 50), (0, 206))
    for operator, given in (
        (counted.counted_logits, (x, weight, bias, end, first)),
        (counted.counted_dx, (slopes, weight.t(), end, first)),
        (counted.counted_dw_, (total, slopes, x, end, first, True)),
        (counted.counted_db, (slopes, end, first)),
    ):
        # Rows that do not count hold anything, which two calls need not agree on.
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    pytest.importorskip("triton")
    given = [case(*shape, biased=i % 2 == 0) for i, shape in enumerate(CASES)]
    for found, one in zip(interpreted(CHILD, tmp_path, given), given, strict=True):
        check(found, one, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logits", "dx", "dw", "dw added"])
def test_kernels_do_not_spill(name):
    """Of XLM-R's head: 250,002 words, which rows of 16 bytes do not divide."""
    own = pytest.importorskip("stepgraph.kernels.loss.counted_triton")
    weight = name.startswith("dw")
    kernel = own._weight_kernel if weight else own._product_kernel
    kinds = dict.fromkeys(("slopes", "x", "out", "a", "b"), "*bf16") | {"end": "*i32"}
    kinds |= dict.fromkeys(set(kernel.arg_names[4 - weight :]) - {"first"}, "i32") | {"first": "i32"}
    kinds = {n: k for n, k in kinds.items() if n in kernel.arg_names and n != "end"} | {"end": "*i32"}
    for tile in (own.WIDE, own.NARROW):
        rows, columns, step, stages, warps, programs = tile
        constants = {"ROWS": rows, "COLUMNS": columns, "STEP": step, "STAGES": stages, "GROUP": own._GROUP}
        constants |= {"PROGRAMS": 132 * programs}
        if weight:
            constants |= {"ADD": name == "dw added"}
        else:
            one = "B_ROW" if name == "logits" else "B_COLUMN"
            constants |= {"bias": None, one: 1, "PADDED": True, "SPLITS": 1 if name == "logits" else own._SPLITS}
            constants |= {"WHOLE": name == "logits", "ALIGNED": name == "dx"}
            constants |= {"STAGES": 3} if name == "logits" else {}
        given = {n: k for n, k in kinds.items() if n not in constants} | ({"out": "*fp32"} if name == "dx" else {})
        aligned = [n for n in given if n not in ("V", "K" if name == "dx" else "N")]
        ptx = assert_no_spills(kernel, given, constants, warps, aligned)
        assert "wgmma" in ptx and "cp.async.cg" in ptx

"""The cross entropy of a vocabulary in parts against torch's own of the whole, in float64: references, operators, and
the kernels interpreted."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.loss.split import gradient_reference, softmax_parts, split_gradient_
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("cross_entropy_split_child.py")

IGNORE, INF = -100, float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, V, dtype=torch.float32, *, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, V, generator=generator) * scale).to(dtype)
    targets = torch.randint(V, (rows,), generator=generator)
    return logits, torch.where(torch.rand(rows, generator=generator) < 0.2, IGNORE, targets)


def truth(logits, targets):
    """(log of the sum of exponentials, gradient of the mean loss, each row's slope) of the whole, in float64."""
    wide = logits.double().requires_grad_()
    F.cross_entropy(wide, targets, reduction="sum").div(7).backward()
    return wide.detach().logsumexp(1), wide.grad, (targets != IGNORE).double() / 7


def check_parts(parts, logits):
    highest, total = parts
    wide = logits.double()
    assert highest.dtype == total.dtype == torch.float32
    assert torch.equal(highest.double(), wide.amax(1))
    # A sum of V fp32 exponentials, each off by some units of 2^-24.
    torch.testing.assert_close(total.double(), (wide - wide.amax(1, keepdim=True)).exp().sum(1), rtol=2e-6, atol=0)


def check_gradient(slopes, expected, dtype):
    # The log sum in fp32, up to 100, is off by 2^-18, and the softmax relatively by as much; then one rounding.
    rtol, atol = max(torch.finfo(dtype).eps, 2e-5), 2**-25 if dtype == torch.float16 else 1e-7
    assert slopes.dtype == dtype
    torch.testing.assert_close(slopes.double(), expected, rtol=rtol, atol=atol)


def part(logits, targets, start, stop):
    """One rank's columns: (logits, log sum, column, slope) and the gradient that they should get."""
    log_sum, expected, slope = truth(logits, targets)
    inside = (targets >= start) & (targets < stop)
    column = torch.where(inside, targets - start, -1)
    own = logits[:, start:stop].clone(memory_format=torch.contiguous_format)
    return (own, log_sum.float(), column, slope.float()), expected[:, start:stop]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9), V=st.integers(2, 40), dtype=st.sampled_from(DTYPES), at=st.integers(1, 39),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_parts_make_the_whole(rows, V, dtype, at, seed):
    logits, targets = inputs(rows, V, dtype, seed=seed)
    at = min(at, V - 1)
    found = []
    for start, stop in ((0, at), (at, V)):
        given_part, expected = part(logits, targets, start, stop)
        parts = softmax_parts(given_part[0])
        check_parts(parts, given_part[0])
        found.append(parts)
        split_gradient_(*given_part)
        check_gradient(given_part[0], expected, dtype)
    highest = torch.maximum(found[0][0], found[1][0])
    total = sum(total * (own - highest).exp() for own, total in found)
    torch.testing.assert_close((highest + total.log()).double(), truth(logits, targets)[0], rtol=2e-6, atol=1e-6)


def test_minus_infinity_and_rows_that_do_not_count():
    logits, _ = inputs(4, 9)
    logits[0] = -INF
    highest, total = softmax_parts(logits)
    assert highest[0] == -INF and total[0] == 0 and total[1:].isfinite().all()
    logits[1, :4] = -INF
    check_parts([p[1:] for p in softmax_parts(logits)], logits[1:])
    nothing = torch.full((4,), -1)
    for slope in (torch.zeros(4), torch.tensor([0.0, 1.0, 1.0, 0.0])):
        slopes = gradient_reference(logits, logits.logsumexp(1), nothing, slope)
        assert not slopes[slope == 0].any() and slopes.isfinite().all()


def test_opcheck():
    logits, targets = inputs(4, 6)
    torch.library.opcheck(softmax_parts, (logits,))
    torch.library.opcheck(split_gradient_, part(logits, targets, 0, 6)[0])


def test_kernels_interpreted(tmp_path):
    """In one block and over several, masked logits and rows apart in memory among them."""
    pytest.importorskip("triton")
    cases, expected = [], []
    for i, (rows, V, start, stop) in enumerate([(5, 2, 0, 1), (4, 32, 16, 32), (3, 50, 33, 50), (4, 129, 0, 100)]):
        logits, targets = inputs(rows, V, DTYPES[i % 3], seed=i)
        targets[0] = IGNORE
        logits[1, start : start + 16 : 2] = -INF
        targets[1] = stop - 1
        for config in ((128, 1), (16, 1), None):
            given_part, slopes = part(logits, targets, start, stop)
            cases.append((*given_part, config))
            expected.append(slopes)
    wide, targets = inputs(4, 40)
    given_part, slopes = part(wide, targets, 0, 40)
    apart = torch.zeros(4, 50)[:, :40].copy_(wide)
    for crooked in (apart, wide.t().contiguous().t()):  # rows that lie apart, and columns that do
        cases.append((crooked, *given_part[1:], (16, 1)))
        expected.append(slopes)
    whole_row = wide.clone()
    whole_row[2] = -INF
    cases.append((whole_row, *given_part[1:], (16, 1)))
    for i, (case, (parts, slopes)) in enumerate(zip(cases, interpreted(CHILD, tmp_path, cases), strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True)), "equal bits from run to run"
        if i < len(expected):
            if case[0].shape[1] > 1:  # else a row of -inf alone
                check_parts(parts[0], case[0])
            check_gradient(slopes, expected[i], case[0].dtype)
        else:
            assert parts[0][0][2] == -INF and parts[0][1][2] == 0


@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
def test_no_configuration_spills(element):
    kernels = pytest.importorskip("stepgraph.kernels.loss.split_triton")
    parts = {"logits": f"*{element}", "highest": "*fp32", "total": "*fp32"}
    gradient = {"logits": f"*{element}", "log_sum": "*fp32", "column": "*i64", "slope": "*fp32"}
    for V in (100, 4096, 64128):
        for kernel, kinds, config in (
            (kernels._parts_kernel, parts, kernels.configuration(V)),
            (kernels._gradient_kernel, gradient, kernels.gradient_configuration(V)),
        ):
            block, warps = config
            assert_no_spills(kernel, kinds | {"stride": "i32", "V": "i32"}, {"BLOCK": block}, warps)

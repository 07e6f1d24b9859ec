"""Cross entropy with its gradient against torch's own in float64: reference, operator, and the kernel interpreted."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.loss.cross_entropy import cross_entropy_, reference
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("cross_entropy_child.py")

IGNORE = -100
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def truth(logits, targets, grad, mean, ignore, cap=0.0):
    """(loss, gradient) in float64 from torch's own cross entropy."""
    wide = logits.double().requires_grad_()
    seen = cap * torch.tanh(wide / cap) if cap else wide
    loss = F.cross_entropy(seen, targets, ignore_index=ignore, reduction="mean" if mean else "sum")
    (loss * grad.double()).backward()
    return loss.detach(), wide.grad


def check(loss, slopes, logits, targets, grad, mean, ignore=IGNORE, cap=0.0):
    """Against `truth`: the loss in fp32; the gradient to one rounding of its dtype, and fp32's error before it."""
    expected, gradient = truth(logits, targets, grad, mean, ignore, cap)
    assert loss.dtype == torch.float32 and slopes.dtype == logits.dtype
    # Sums of V fp32 exponentials: relative 1e-6; the logits' size, here up to 100, times 2^-24 is lost in a difference.
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-5, equal_nan=True)
    # A softmax below half the smallest subnormal of fp16, 2^-25, is zero there.
    atol = 2**-25 if logits.dtype == torch.float16 else 1e-6 * float(grad.abs())
    rtol = max(torch.finfo(logits.dtype).eps, 2e-5)
    torch.testing.assert_close(slopes.double(), gradient, rtol=rtol, atol=max(atol, 1e-9))


def inputs(rows, V, dtype=torch.float32, *, scale=4.0, ignored=0.2, ignore=IGNORE, seed=0):
    """(logits, targets) with some rows that do not count."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, V, generator=generator) * scale).to(dtype)
    targets = torch.randint(V, (rows,), generator=generator)
    return logits, torch.where(torch.rand(rows, generator=generator) < ignored, ignore, targets)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9), V=st.integers(1, 40), dtype=st.sampled_from(DTYPES), mean=st.booleans(),
    ignore=st.sampled_from([IGNORE, 0]), grad=st.sampled_from([1.0, -0.25, 0.0, 3.0]), seed=st.integers(0, 99),
    cap=st.sampled_from([0.0, 2.0, 30.0]),
)  # fmt: skip
def test_reference_and_operator(rows, V, dtype, mean, ignore, grad, seed, cap):
    logits, targets = inputs(rows, V, dtype, ignore=ignore, seed=seed)
    given_logits, grad = logits.clone(), torch.tensor(grad)
    loss, slopes = reference(logits, targets, grad, mean, ignore, cap)
    assert torch.equal(logits, given_logits)
    check(loss, slopes, logits, targets, grad, mean, ignore, cap)
    assert torch.equal(cross_entropy_(given_logits, targets, grad, mean, ignore, False, cap), loss) or loss.isnan()
    assert torch.equal(given_logits, slopes)


def test_reference_in_float64():
    logits, targets = inputs(5, 7, torch.float64)
    loss, slopes = reference(logits, targets, torch.tensor(2.0), True, IGNORE)
    expected, gradient = truth(logits, targets, torch.tensor(2.0), True, IGNORE)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(slopes, gradient, rtol=1e-13, atol=1e-16)


def test_no_row_counts():
    """As torch: the mean of nothing is NaN, its gradient zero; the sum is zero."""
    logits, targets = inputs(3, 5, ignored=2.0)
    for mean in (True, False):
        loss, slopes = reference(logits, targets, torch.tensor(1.0), mean, IGNORE)
        expected, gradient = truth(logits, targets, torch.tensor(1.0), mean, IGNORE)
        assert loss.isnan() if mean else loss == 0
        assert loss.isnan() == expected.isnan() and torch.equal(slopes.double(), gradient)


@pytest.mark.parametrize("target", [5, -1, -100])
def test_targets_out_of_range(target):
    """NaN, where torch raises: a kernel on a GPU can only fail the whole process."""
    logits, targets = inputs(3, 5, ignored=0)
    targets[1] = target
    loss, slopes = reference(logits, targets, torch.tensor(1.0), True, ignore=-7)
    assert loss.isnan() and slopes[[0, 2]].isfinite().all()


def masked():
    """Logits of -inf, as masks of the vocabulary write them: next to the target, and (the last row) on it."""
    logits, targets = inputs(4, 9, ignored=0)
    logits[0, :] = -INF
    logits[0, targets[0]] = 1.5
    logits[1, (targets[1] + 1) % 9] = -INF
    logits[2, :4] = -INF
    targets[2] = 6
    return logits, targets


def test_logits_of_minus_infinity():
    logits, targets = masked()
    loss, slopes = reference(logits, targets, torch.tensor(1.0), True, IGNORE)
    check(loss, slopes, logits, targets, torch.tensor(1.0), True)
    assert loss.isfinite() and not slopes[logits == -INF].any()
    targets[2] = 0  # of probability zero
    assert reference(logits, targets, torch.tensor(1.0), True, IGNORE)[0] == INF


@pytest.mark.parametrize("mean", [True, False])
def test_opcheck(mean):
    logits, targets = inputs(4, 6)
    torch.library.opcheck(cross_entropy_, (logits, targets, torch.tensor(1.0), mean, IGNORE))


def test_kernel_interpreted(tmp_path):
    """Each case in one block and looped over small ones, twice: right, and equal bits."""
    pytest.importorskip("triton")
    one, looped = (256, 1), (16, 1)
    cases = []
    for i, (rows, V) in enumerate([(5, 1), (4, 16), (3, 17), (4, 50), (2, 129)]):
        logits, targets = inputs(rows, V, DTYPES[i % 3], seed=i)
        for config in (one, looped, None):
            for cap in (0.0, 5.0):
                cases.append((logits, targets, torch.tensor([1.0, -0.5][i % 2]), i % 2 == 0, IGNORE, cap, config))
    wide, targets = inputs(4, 40)
    logits, masked_targets = masked()
    strided = torch.stack([targets, targets], 1)[:, 1]
    for config in (one, looped, (4, 1)):
        cases.append((logits, masked_targets, torch.tensor(1.0), True, IGNORE, 3.0, config))
        cases.append((wide * 100, targets, torch.tensor(1.0), True, IGNORE, 30.0, config))
        cases.append((logits, masked_targets, torch.tensor(1.0), True, IGNORE, 0.0, config))
        cases.append((wide * 20, targets.clamp(min=0), torch.tensor(2.0), True, 0, 0.0, config))
        cases.append((wide, torch.full_like(targets, IGNORE), torch.tensor(1.0), True, IGNORE, 0.0, config))
        cases.append((wide, strided, torch.tensor(1.0, dtype=torch.float32), False, IGNORE, 0.0, config))
    for case, ((loss, again), (slopes, repeated)) in zip(cases, interpreted(CHILD, tmp_path, cases), strict=True):
        check(loss, slopes, *case[:-1])
        assert torch.equal(loss, again) or (loss.isnan() and again.isnan())
        assert torch.equal(slopes, repeated)


def test_kernel_interpreted_at_the_edges(tmp_path):
    """Rows apart in memory keep what lies between them; targets out of range and logits without a number give NaN."""
    pytest.importorskip("triton")
    wide, targets = inputs(4, 40, ignored=0)
    out, whole_row, hole = targets.clone(), wide.clone(), wide.clone()
    out[1], out[2] = 40, -1
    whole_row[3] = -INF
    hole[2, 7] = float("nan")
    cases = []
    for config in ((64, 1), (16, 1)):
        for apart in (wide[:, :33], wide[:, :33].t().contiguous().t()):  # rows that lie apart, and columns that do
            cases.append((apart, targets.clamp(max=32), torch.tensor(1.0), True, IGNORE, 0.0, config))
        for logits, classes in ((wide, out), (whole_row, targets), (hole, targets)):
            cases.append((logits, classes, torch.tensor(1.0), True, IGNORE, 0.0, config))
    results = interpreted(CHILD, tmp_path, cases)
    for (logits, classes, grad, mean, ignore, _, _), (losses, slopes) in zip(cases, results, strict=True):
        if logits.shape[1] == 33:
            check(losses[0], slopes[0], logits, classes, grad, mean, ignore)
        else:
            assert losses[0].isnan() and slopes[0][0].isfinite().all()


def test_no_configuration_spills():
    kernels = pytest.importorskip("stepgraph.kernels.loss.cross_entropy_triton")
    configuration = kernels.configuration
    kinds = {"targets": "*i64", "scale": "*fp32", "losses": "*fp32", "cap": "fp32"}
    kinds |= dict.fromkeys(("stride", "V", "ignore"), "i32")
    chosen = {(*configuration(V), configuration(V)[0] >= V) for V in range(1, 262145, 61)} | {
        (*configuration(8192), True)
    }
    assert {block for block, _, _ in chosen} == {2**k for k in range(7, 14)}
    for block, warps, one in sorted(chosen):
        assert warps in (1, 2, 4, 8)
        for element, cap in (("fp32", False), ("bf16", False), ("bf16", True)) if block >= 1024 else (("fp32", True),):
            logits = {"logits": f"*{element}"}
            kind = {"BLOCK": block, "ONE": one, "ORDERED": False, "CAP": cap}
            assert_no_spills(kernels._kernel, kinds | logits, kind, warps)


def test_rows_of_any_length_move_in_16_bytes():
    """Whatever V is: a mask that ends at V alone makes 128 loads of 2 bytes of each block."""
    kernels = pytest.importorskip("stepgraph.kernels.loss.cross_entropy_triton")
    kinds = {"logits": "*bf16", "targets": "*i64", "scale": "*fp32", "losses": "*fp32", "cap": "fp32"}
    kinds |= dict.fromkeys(("stride", "V", "ignore"), "i32")
    block, warps = kernels.configuration(50257)
    kind = {"BLOCK": block, "ONE": False, "ORDERED": False, "CAP": False}
    ptx = assert_no_spills(kernels._kernel, kinds, kind, warps, aligned=("logits", "stride"))
    assert len(re.findall(r"(?:ld|st)\.global\S*v4", ptx)) >= 3 * block * 2 // (16 * 32 * warps)
    assert len(re.findall(r"ld\.global\S*b16", ptx)) < 5

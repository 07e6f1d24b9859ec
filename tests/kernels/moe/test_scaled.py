"""Products of experts' rows in fp8, compared with float64 products of the cast values; packed rows; torch's checks."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from stepgraph import compat
from stepgraph.kernels.fp8 import cast_scaled_rows
from stepgraph.kernels.moe import (
    cast_packed_rows,
    cast_scaled_groups,
    gather_rows,
    grouped_scaled_mm,
    grouped_scaled_mm_weight,
    sort_by_expert,
    swiglu_rows,
    swiglu_rows_cast,
    swiglu_rows_cast_backward,
)
from stepgraph.kernels.moe.packed import unpack
from stepgraph.kernels.moe.swiglu import swiglu_rows_backward
from tests.kernels.moe.test_moe import data

E4M3 = torch.float8_e4m3fn
COUNTS = ([7, 0, 23, 16], [0, 0], [1], [64, 3])


def arguments(counts, D=32, F=48, past=3):
    """(rows, stored weights, output gradients, offsets); rows that no expert has are NaN."""
    R = sum(counts) + past
    rows, dy = data(R, D, seed=1, dtype=torch.bfloat16), data(R, F, seed=2, dtype=torch.bfloat16)
    rows[R - past :] = dy[R - past :] = torch.nan
    weight = data(len(counts), F, D, seed=3, dtype=torch.bfloat16)
    return rows, weight, dy, torch.tensor(counts).cumsum(0, dtype=torch.int32)


def by_rows(x):
    """(values, scales) of the last dimension's rows."""
    q, scale, _, _ = cast_scaled_rows(x.reshape(-1, x.shape[-1]), E4M3, True, False)
    return q.view(x.shape), scale.view(x.shape[:-1])


@pytest.mark.parametrize("counts", COUNTS)
def test_rows_of_each_expert_with_its_matrix(counts):
    rows, weight, _, offsets = arguments(counts)
    packed, (w, weight_scale) = cast_packed_rows(rows), by_rows(weight)
    y = grouped_scaled_mm(packed, w, weight_scale, offsets)
    q, scale = unpack(packed)
    exact_rows, exact_weight = q.double() * scale[:, None], w.double() * weight_scale[..., None]
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("rd,rfd->rf", exact_rows[: len(owners)], exact_weight[owners])
    torch.testing.assert_close(y[: len(owners)].double(), expected, rtol=2**-8, atol=1e-4)
    assert not y[len(owners) :].any() and y.dtype == torch.bfloat16


@pytest.mark.parametrize("counts", COUNTS)
def test_weight_gradients_sum_over_the_rows_of_each_expert(counts):
    rows, _, dy, offsets = arguments(counts)
    (a, scale_a, ends), (b, scale_b, same) = (cast_scaled_groups(x, offsets, E4M3) for x in (dy, rows))
    assert torch.equal(ends, same) and not (ends % 16).any()
    found = grouped_scaled_mm_weight(a, b, scale_a, scale_b, ends)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        exact = dy[start:end].double().t() @ rows[start:end].double()
        bound = 0.05 * dy[start:end].double().norm() * rows[start:end].double().norm()
        assert (found[expert].double() - exact).norm() <= bound
        # A part has the bits of the expert's rows cast by themselves, and zeros behind them.
        at = int(ends[expert]) - -(-(end - start) // 16) * 16
        alone = cast_scaled_rows(dy[start:end], E4M3, False, True)[2] if end > start else a[:, at:at]
        assert torch.equal(a[:, at : at + end - start].view(torch.uint8), alone.view(torch.uint8))
        assert not a[:, at + end - start : ends[expert]].float().any()
        start = end


def test_packed_rows_have_the_bits_of_casts_and_move_as_one():
    rows, _, _, offsets = arguments([7, 0, 23, 16])
    packed, (q, scale) = cast_packed_rows(rows), by_rows(rows)
    values, row_scale = unpack(packed)
    assert torch.equal(values.view(torch.uint8), q.view(torch.uint8)) and torch.equal(row_scale.isnan(), scale.isnan())
    order, places, _ = sort_by_expert(torch.tensor([[2, 0], [1, 2], [0, -1]]), 3)
    moved, whole = (gather_rows(x[:3], order, places) for x in (rows, packed))
    assert torch.equal(whole[:5, :36], cast_packed_rows(moved)[:5, :36]) and not whole[5:].any()
    # Gradients of weights sum over these values: cast again, by expert and column.
    wide = values.float() * row_scale.unsqueeze(1)
    for mine, theirs in zip(*(cast_scaled_groups(x, offsets, E4M3) for x in (packed, wide)), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keep", [False, True])
def test_swiglu_with_its_cast(dtype, keep):
    gate_up, dy = data(20, 96, seed=1, dtype=dtype), data(20, 48, seed=2, dtype=dtype)
    offsets = torch.tensor([5, 17], dtype=torch.int32)
    for found, alone in (
        (swiglu_rows_cast(gate_up, offsets, keep), swiglu_rows(gate_up, offsets)),
        (swiglu_rows_cast_backward(dy, gate_up, offsets, keep), swiglu_rows_backward(dy, gate_up, offsets)),
    ):
        y, packed = found
        assert torch.equal(y, alone) if keep else not y.numel()
        assert torch.equal(packed, cast_packed_rows(alone))


def test_a_nan_stays_with_its_expert_and_column():
    rows, _, _, offsets = arguments([4, 5])
    rows[4, 7] = torch.nan
    q, scale, _ = cast_scaled_groups(rows, offsets, E4M3)
    assert scale.isnan().nonzero().tolist() == [[1, 7]] and set(q.float().isnan().nonzero()[:, 0].tolist()) == {7}
    assert q[7, 16:21].float().isnan().all() and not q[7, 21:32].float().any()


def test_torch_takes_what_the_casts_give():
    """By torch's checks of shapes and strides, which need no GPU."""
    with FakeTensorMode():
        t = lambda *shape, dtype=E4M3: torch.empty(shape, dtype=dtype, device="cuda")  # noqa: E731
        rows, weight, offsets = t(50, 160, dtype=torch.uint8), t(4, 48, 32), t(4, dtype=torch.int32)
        values, scale = unpack(rows)
        scales = scale.clone(memory_format=torch.contiguous_format), t(4, 48, dtype=torch.float32)
        assert compat.scaled_grouped_mm(values, weight.mT, *scales, offsets).shape == (50, 48)
        q, scale, ends = cast_scaled_groups(t(50, 32, dtype=torch.bfloat16), offsets, E4M3)
        found = compat.scaled_grouped_mm(q, q.t(), scale.view(-1), scale.view(-1), ends)
        assert found.shape == (4, 32, 32) and found.dtype == torch.bfloat16


def test_fakes_and_errors():
    rows, weight, dy, offsets = arguments([4, 5])
    packed, (w, weight_scale) = cast_packed_rows(rows[:9]), by_rows(weight)
    a, scale_a, ends = cast_scaled_groups(dy, offsets, E4M3)
    kinds = ("test_autograd_registration", "test_faketensor")
    ours = torch.ops.stepgraph
    torch.library.opcheck(ours.cast_packed_rows, (rows[:9],))
    for x in (dy[:9], packed):
        torch.library.opcheck(ours.cast_scaled_groups, (x, offsets, E4M3))
    for keep in (False, True):
        torch.library.opcheck(ours.swiglu_rows_cast, (rows[:9], offsets, keep))
        torch.library.opcheck(ours.swiglu_rows_cast_backward, (rows[:9, :16], rows[:9], offsets, keep))
    torch.library.opcheck(ours.grouped_scaled_mm, (packed, w, weight_scale, offsets), test_utils=kinds)
    torch.library.opcheck(ours.grouped_scaled_mm_weight, (a, a, scale_a, scale_a, ends), test_utils=kinds)

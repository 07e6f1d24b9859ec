"""Sorting by expert, rows there and back, and grouped products against plain torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.moe import combine_rows, gather_rows, grouped_mm, grouped_mm_weight, sort_by_expert

ours = torch.ops.stepgraph


def routing(tokens, slots, experts, seed, unused=True):
    """(chosen, order, places, counts); some slots are of no expert where ``unused``."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(
        -1 if unused else 0, experts + 1 if unused else experts, (tokens, slots), generator=generator
    )
    return chosen, *sort_by_expert(chosen, experts)


def data(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 9), st.integers(0, 999), st.booleans())
def test_sort_by_expert(tokens, slots, experts, seed, narrow):
    chosen, order, places, counts = routing(tokens, slots, experts, seed)
    if narrow:
        assert all(map(torch.equal, (order, places, counts), sort_by_expert(chosen.int(), experts)))
    flat = chosen.flatten().tolist()
    expected = sorted((i for i, e in enumerate(flat) if 0 <= e < experts), key=lambda i: (flat[i], i))
    assert order.tolist() == expected + [-1] * (len(flat) - len(expected))
    rows = {slot: row for row, slot in enumerate(expected)}
    assert places.flatten().tolist() == [rows.get(slot, -1) for slot in range(len(flat))]
    assert counts.tolist() == [flat.count(e) for e in range(experts)]
    assert {t.dtype for t in (order, places, counts)} == {torch.int32} and places.shape == chosen.shape


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 9), slots=st.integers(1, 4), D=st.integers(1, 9), seed=st.integers(0, 999),
    longer=st.integers(0, 5), weighted=st.booleans(), ordered=st.booleans(),
)  # fmt: skip
def test_rows_are_matrix_products(tokens, slots, D, seed, longer, weighted, ordered):
    """Gathering is the product with a matrix of zeros and ones, combining with its transpose, weighted."""
    _, order, places, _ = routing(tokens, slots, 3, seed)
    order = torch.cat([order, order.new_full((longer,), -1)])  # a buffer may be larger than what it holds
    weights = data(tokens, slots, seed=seed) if weighted else torch.ones(tokens, slots).double()
    leaves = [t.requires_grad_() for t in (data(tokens, D, seed=seed + 1), data(len(order), D, seed=seed + 2), weights)]
    x, rows, weights = leaves
    hit = torch.arange(len(order)) == places.unsqueeze(2)  # (N, K, R)
    expected = hit.sum(1).double().t() @ x, (hit * weights.unsqueeze(2)).sum(1) @ rows
    found = (
        gather_rows(x, order, places),
        combine_rows(rows, places, weights if weighted else None, order if ordered else None),
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    loss, right = (sum((t * data(*t.shape, seed=9)).sum() for t in pair) for pair in (found, expected))
    wanted = leaves if weighted else leaves[:2]
    for mine, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(right, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_sums_are_fp32_and_in_the_order_of_slots():
    _, order, places, _ = routing(50, 8, 5, 1, unused=False)
    rows, weights = data(400, 7, dtype=torch.bfloat16), data(50, 8, dtype=torch.float32)
    total = torch.zeros(50, 7)
    for k in range(8):
        total += rows[places[:, k].long()].float() * weights[:, k, None]
    assert torch.equal(combine_rows(rows, places, weights), total.bfloat16())
    grad = gather_rows(data(50, 7, dtype=torch.bfloat16), order, places)
    assert torch.equal(grad, data(50, 7, dtype=torch.bfloat16)[order.long() // 8])


def test_nothing_of_an_unused_row_comes_through():
    places, order = torch.tensor([[1], [-1]], dtype=torch.int32), torch.tensor([-1, 0, -1], dtype=torch.int32)
    rows = torch.full((3, 4), torch.nan)
    rows[1] = 2.0
    weights = torch.tensor([[3.0], [torch.nan]], requires_grad=True)
    out = combine_rows(rows.requires_grad_(), places, weights, order)
    assert out.tolist() == [[6.0] * 4, [0.0] * 4]
    drows, dweights = torch.autograd.grad(out.sum(), [rows, weights])
    assert drows.tolist() == [[0.0] * 4, [3.0] * 4, [0.0] * 4] and dweights.tolist() == [[8.0], [0.0]]
    assert gather_rows(torch.full((2, 4), 5.0), order, places).tolist() == [[0.0] * 4, [5.0] * 4, [0.0] * 4]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), D=st.integers(1, 7), width=st.integers(1, 7),
    past=st.integers(0, 4), transposed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_grouped_mm(counts, D, width, past, transposed, seed):
    """Also of experts without rows, and with rows past the last expert's, which are not read."""
    used, experts = sum(counts), len(counts)
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows = torch.cat([data(used, D, seed=seed), torch.full((past, D), torch.nan).double()]).requires_grad_()
    stored = data(experts, *((width, D) if transposed else (D, width)), seed=seed + 1).requires_grad_()
    weight = stored.mT if transposed else stored
    owners = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("rd,rdf->rf", rows[:used], weight[owners])
    out = grouped_mm(rows, weight, offsets)
    torch.testing.assert_close(out[:used], expected, rtol=1e-12, atol=1e-12)
    assert not out[used:].any() and out.is_contiguous()
    dy = data(used + past, width, seed=seed + 2)
    mine = torch.autograd.grad((out * dy).sum(), [rows, stored])
    theirs = torch.autograd.grad((expected * dy[:used]).sum(), [rows, stored])
    torch.testing.assert_close(mine[0][:used], theirs[0][:used], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-12, atol=1e-12)
    assert not mine[0][used:].any() and mine[1].is_contiguous()


def test_second_gradients():
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    rows, weight = data(6, 3).requires_grad_(), data(3, 3, 2, seed=1).requires_grad_()
    # Rows past the end have no gradient: numerical differences see that too.
    assert torch.autograd.gradgradcheck(lambda r, w: grouped_mm(r, w, offsets), (rows, weight))
    _, order, places, _ = routing(3, 2, 2, 5)
    assert torch.autograd.gradgradcheck(
        lambda x: combine_rows(gather_rows(x, order, places) ** 2, places), (data(3, 2).requires_grad_(),)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    chosen, order, places, counts = routing(6, 2, 3, 4)
    torch.library.opcheck(ours.sort_by_expert, (chosen, 3))
    x, rows = data(6, 8, dtype=dtype).requires_grad_(), data(12, 8, dtype=dtype).requires_grad_()
    weights, weight = data(6, 2, dtype=torch.float32).requires_grad_(), data(3, 8, 16, dtype=dtype).requires_grad_()
    offsets = counts.cumsum(0, dtype=torch.int32)
    torch.library.opcheck(ours.gather_rows, (x, places, order, 12))
    torch.library.opcheck(ours.combine_rows, (rows, places, weights, order))
    torch.library.opcheck(ours.grouped_mm, (rows, weight, offsets))
    torch.library.opcheck(ours.grouped_mm_weight, (rows, data(12, 16, dtype=dtype), offsets))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sort_by_expert(torch.zeros(3, dtype=torch.int64), 2), r"sort_by_expert got chosen .*\(3,\)"),
        (lambda: sort_by_expert(torch.zeros(3, 2, dtype=torch.int64), 0), "0 experts"),
        (lambda: gather_rows(data(3, 2), *routing(4, 2, 2, 0)[1:3]), r"gather_rows got .*\(3, 2\).*places"),
        (lambda: combine_rows(data(8, 2), routing(4, 2, 2, 0)[2].long()), "combine_rows got .*places torch.int64"),
        (lambda: combine_rows(data(8, 2), routing(4, 2, 2, 0)[2], data(4, 3)), r"weights torch.float64 \(4, 3\)"),
        (lambda: grouped_mm(data(8, 2), data(2, 3, 4), torch.zeros(2, dtype=torch.int32)), "grouped_mm got rows"),
        (lambda: grouped_mm(data(8, 3), data(2, 3, 4), torch.zeros(2, dtype=torch.int64)), "offsets torch.int64"),
        (lambda: grouped_mm(data(8, 3), data(2, 3, 4).float(), torch.zeros(2, dtype=torch.int32)), "same floating"),
        (lambda: grouped_mm_weight(data(8, 3), data(7, 3), torch.zeros(2, dtype=torch.int32)), "grouped_mm_weight got"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(call, message):
    with pytest.raises(ValueError, match=message) as e:
        call()
    assert "\n" not in str(e.value)


def test_widths_that_a_gpu_cannot_run_are_refused_when_traced():
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        rows, weight = torch.empty(8, 12, dtype=torch.bfloat16), torch.empty(2, 12, 16, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="multiples of 8"):
            grouped_mm(rows, weight, torch.empty(2, dtype=torch.int32))

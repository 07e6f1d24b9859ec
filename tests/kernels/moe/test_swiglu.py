"""SwiGLU of experts' rows against plain torch in float64, and bit for bit against eager's roundings."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.moe import swiglu_rows
from stepgraph.kernels.moe.swiglu import swiglu_rows_backward
from tests.kernels.moe.test_moe import data

ours = torch.ops.stepgraph
SIZES = {
    "counts": st.lists(st.integers(0, 6), min_size=1, max_size=5), "width": st.integers(0, 9),
    "past": st.integers(0, 5), "seed": st.integers(0, 99),
}  # fmt: skip


def case(counts, width, past, seed, dtype=torch.float64, rest=torch.nan):
    """(gate_up, offsets, dy, rows in use); the rows past the end hold ``rest``."""
    used = sum(counts)
    gate_up, dy = (data(used + past, w, seed=seed + w, dtype=dtype) for w in (2 * width, width))
    gate_up[used:] = rest
    dy[used:] = rest
    return gate_up, torch.tensor(counts).cumsum(0, dtype=torch.int32), dy, used


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES)
def test_against_float64(counts, width, past, seed):
    """Also without rows, or without columns; nothing of the rows past the end comes through."""
    gate_up, offsets, dy, used = case(counts, width, past, seed)
    gate_up.requires_grad_()
    gate, up = gate_up[:used, :width], gate_up[:used, width:]
    expected = gate * torch.sigmoid(gate) * up
    found = swiglu_rows(gate_up, offsets)
    torch.testing.assert_close(found[:used], expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(found, gate_up, dy)
    (right,) = torch.autograd.grad(expected, gate_up, dy[:used])
    torch.testing.assert_close(gradient[:used], right[:used], rtol=1e-12, atol=1e-12)
    for rows, columns in ((found, width), (gradient, 2 * width)):
        assert rows.shape == (used + past, columns) and rows.is_contiguous() and not rows[used:].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**SIZES, dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_rounds_as_eager(counts, width, past, seed, dtype):
    """Where rows past the end are zero, as a grouped product leaves them, the results are eager's in every bit."""
    gate_up, offsets, dy, _ = case(counts, width, past, seed, dtype, rest=0.0)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    (right,) = torch.autograd.grad(expected, leaf, dy)
    assert torch.equal(swiglu_rows(gate_up, offsets), expected)
    assert torch.equal(swiglu_rows_backward(dy, gate_up, offsets), right)


def test_gradients_against_differences():
    gate_up, offsets, _, _ = case([2, 0, 3], 3, 2, 1, rest=0.5)  # differences there are zero, too
    assert torch.autograd.gradcheck(lambda x: swiglu_rows(x, offsets), (gate_up.requires_grad_(),))


def test_gate_and_up_alone_are_kept_for_backward():
    gate_up, offsets, _, _ = case([2, 3], 4, 1, 1, rest=0.0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        swiglu_rows(gate_up.requires_grad_(), offsets)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr(), offsets.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    gate_up, offsets, dy, _ = case([2, 0, 3], 8, 2, 1, dtype, rest=0.0)
    torch.library.opcheck(ours.swiglu_rows, (gate_up.requires_grad_(), offsets))
    torch.library.opcheck(ours.swiglu_rows_backward, (dy, gate_up.detach(), offsets))

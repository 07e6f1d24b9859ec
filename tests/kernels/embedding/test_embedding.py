"""The gradient of an embedding's table against torch's own in float64: reference, operator, and kernels interpreted."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.embedding.gradient import embedding_backward
from tests.kernels.triton_tools import assert_no_spills, interpreted

CHILD = Path(__file__).with_name("embedding_child.py")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def truth(grad, indices, num_weights, padding):
    """The gradient in float64, from torch's own lookup."""
    table = torch.zeros(num_weights, grad.shape[-1], dtype=torch.float64, requires_grad=True)
    F.embedding(indices, table, padding_idx=padding if padding >= 0 else None).backward(grad.double())
    return table.grad


def check(result, grad, indices, num_weights, padding):
    expected = truth(grad, indices, num_weights, padding)
    assert (result.dtype, result.shape) == (grad.dtype, expected.shape) and result.is_contiguous()
    # A sum of n numbers up to about 4, with n roundings to fp32 of sums up to about 4 sqrt(n); one rounding at the end.
    longest = max(indices.flatten().bincount().tolist(), default=0)
    rtol = torch.finfo(result.dtype).eps
    atol = 1e-14 if result.dtype == torch.float64 else 2**-22 * max(longest, 1)
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=atol)
    assert not result[expected.eq(0).all(1)].any()


def inputs(shape, D, num_weights, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=generator).to(dtype), torch.randint(num_weights, shape, generator=generator)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), D=st.integers(1, 17), num_weights=st.integers(1, 30),
    dtype=st.sampled_from([*DTYPES, torch.float64]), narrow=st.booleans(), padded=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_reference(shape, D, num_weights, dtype, narrow, padded, seed):
    grad, indices = inputs(shape, D, num_weights, dtype, seed)
    padding = seed % num_weights if padded else -1
    given_indices = indices.int() if narrow else indices
    check(embedding_backward(grad, given_indices, num_weights, padding), grad, indices, num_weights, padding)


def test_rows_apart_in_memory():
    grad, indices = inputs((7, 5), 6, 4)
    apart = grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not apart.is_contiguous()
    check(embedding_backward(apart, indices, 4, -1), grad, indices, 4, -1)


def test_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(embedding_backward, (*inputs((3, 5), 6, 9, dtype), 9, -1))
    torch.library.opcheck(embedding_backward, (*inputs((0,), 6, 9), 9, 2))


def test_it_writes_into_nothing():
    assert not embedding_backward._opoverload._schema.is_mutable


def runs(*lengths):
    """Indices 0, 1, ... as many times each as ``lengths`` says, shuffled."""
    indices = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(3))]


@pytest.mark.slow
def test_kernels_interpreted(tmp_path):
    """Runs within a chunk of 32, that end or begin at its bounds, and over two, three and more than 17 chunks."""
    pytest.importorskip("triton")
    chosen = [
        (runs(1), 3, 5, -1),  # one place
        (runs(5, 27, 32, 1, 31), 40, 7, -1),  # bounds of runs are bounds of chunks
        (runs(3, 30, 64, 33, 1, 1, 96, 5), 33, 9, -1),  # over two chunks and more, two bounds of runs in one chunk
        (runs(70, 40, 50), 5, 3, 1),  # a padding row between others
        (runs(0, 3, 40), 16, 3, 2),  # a padding row at the end
        (runs(700), 4, 1, -1),  # one row of 22 chunks: more partial sums than are loaded at once
        (runs(650, 20), 4, 2, 0),  # all but the padding
        (runs(*[1] * 50), 200, 64, -1),  # columns in two blocks of the second kernel, each row once
        (runs(90, 90).view(3, 6, 10), 150, 2, -1),
    ]
    cases = []
    for i, (indices, D, num_weights, padding) in enumerate(chosen):
        generator = torch.Generator().manual_seed(i)
        grad = torch.randn(*indices.shape, D, generator=generator).to(DTYPES[i % 3])
        cases.append((grad, indices.int() if i % 2 else indices, num_weights, padding))
    wide, indices = inputs((40,), 600, 3)  # fp32: two blocks of columns
    cases.append((wide, indices, 3, -1))
    cases.append((wide.t().contiguous().t(), indices, 3, -1))
    cases.append((*inputs((0,), 6, 9), 9, -1))
    # A GPU's lookup stops at indices that are no rows; here nothing is written outside the table.
    outside = (torch.ones(80, 4), torch.tensor([-3, 0, 5, 1] * 20), 5, -1)
    *results, skipped = interpreted(CHILD, tmp_path, [*cases, outside])
    for (grad, indices, *rest), result in zip(cases, results, strict=True):
        check(result, grad, indices.long(), *rest)
    assert skipped.tolist() == [[20.0] * 4] * 2 + [[0.0] * 4] * 3
    assert torch.equal(embedding_backward(*outside), skipped)


@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
def test_no_configuration_spills(element):
    kernels = pytest.importorskip("stepgraph.kernels.embedding.gradient_triton")
    size = 4 if element == "fp32" else 2
    tensors = ["grad", "order", "rows", "out", "partial"]
    kinds = {"grad": f"*{element}", "order": "*i64", "rows": "*i32", "out": f"*{element}", "partial": "*fp32"}
    kinds |= dict.fromkeys(("N", "D", "num_weights", "padding"), "i32")
    for D, aligned in ((33, tensors), (2048, [*tensors, "D"])):
        (block, warps), (narrow, few) = kernels.configuration(D, size), kernels.join_configuration(D)
        for kernel, constants, count in (
            (kernels._chunk_kernel, {"CHUNK": kernels.CHUNK, "AHEAD": kernels.AHEAD, "BLOCK": block}, warps),
            (kernels._join_kernel, {"CHUNK": kernels.CHUNK, "PARTIALS": kernels.PARTIALS, "BLOCK": narrow}, few),
        ):
            assert_no_spills(kernel, kinds, constants, count, aligned)

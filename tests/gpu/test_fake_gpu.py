"""Fake tensors have the memory layout that a GPU's kernels give."""

import pytest

from tests.capture.test_fake import OPERATORS, check_layouts


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_lie_in_memory_as_real_ones(name):
    check_layouts(OPERATORS[name], "cuda")

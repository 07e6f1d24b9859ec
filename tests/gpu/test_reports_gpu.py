"""Steps after public reports on Inductor on a GPU, where its code is another than a CPU's."""

import pytest
import torch

from tests.passes.compile import test_reports


@pytest.fixture(autouse=True)
def _on_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("function", test_reports.CASES, ids=lambda function: function.__name__)
def test_a_step_is_what_eager_computes(function):
    test_reports.test_a_step_is_what_eager_computes(function)

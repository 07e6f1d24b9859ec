"""Steps from public reports on Inductor, on a GPU, for which it generates other code than for a CPU."""

import pytest
import torch
import torch.nn.functional as F

from tests.passes.compile import test_reports


@pytest.fixture(autouse=True)
def _on_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def rows_of_a_slice(w, b, x):  # ptxas lost constants of positions in the sum's tile
    written = torch.slice_scatter(w, x[:2], 0, 1, 5, 2)
    b.copy_(written)
    return (written * x).sum()


def windows_added_up(w, b, x):
    columns = F.unfold((w * x).view(2, 3, 7, 9), 3, padding=1)
    folded = F.fold(columns, (7, 9), 3, padding=1).view(-1)
    b.copy_(folded)
    return (folded * x).sum()


def integers_and_casts(w, b, x):
    i = (x * 1000).int()
    b.copy_((i << 40) + (i >> 70) + (x * 300).to(torch.int8) + torch.div(x, x, rounding_mode="trunc"))
    b.add_((x * 400).to(torch.float8_e4m3fn).float() + (x * 100).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    return (w * i.to(torch.float8_e5m2).float().nan_to_num(0, 0, 0)).mean()


def gradients_of_products(w, b, x):
    return (w * 0.01 + 1).prod(1).sum()


GPU_CASES = {
    rows_of_a_slice: (5, 37),
    windows_added_up: (378,),
    integers_and_casts: (4, 37),
    gradients_of_products: (2, 4099),
}


@pytest.mark.parametrize("function", test_reports.CASES | GPU_CASES, ids=lambda function: function.__name__)
def test_a_step_is_what_eager_computes(function):
    test_reports.compare(function, (test_reports.CASES | GPU_CASES)[function])

"""sum_products: its reference, torch's checks of an operator, and inputs that it refuses."""

import pytest
import torch

from stepgraph.kernels.lora import sum_products
from stepgraph.kernels.lora.sums import reference


def matrices(dtype=torch.float64, grad=False):
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return [made(6, 4), made(8, 6).t()], [made(4, 5), made(5, 8).t()], made(5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_reference(dtype, bound, biased, scale):
    a, b, bias = matrices(dtype)
    y = sum_products(a, b, bias if biased else None, scale)
    expected = scale * (a[0].double() @ b[0].double()) + a[1].double() @ b[1].double() + biased * bias.double()
    assert y.dtype == dtype and y.is_contiguous()
    for found in (y, reference(a, b, bias if biased else None, scale)):
        assert (found - expected).norm() <= bound * expected.norm()


def test_it_is_an_operator_that_torch_checks():
    a, b, bias = matrices(grad=True)
    torch.library.opcheck(sum_products, (a, b, bias, 0.5))
    assert torch.autograd.gradcheck(lambda *t: sum_products(list(t[:2]), list(t[2:4]), t[4], 0.5), (*a, *b, bias))

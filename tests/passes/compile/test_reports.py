"""Small steps after public reports on Inductor, each of which was silently wrong: losses, gradients and buffers are
eager's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stepgraph

pytestmark = pytest.mark.slow


@torch.library.custom_op("stepgraph_tests::reversed_into", mutates_args=("into",))
def reversed_into(rows: torch.Tensor, into: torch.Tensor) -> None:
    for i, row in enumerate(rows):
        into[len(into) - 1 - i] = row


class Step(nn.Module):
    """``function(weight, buffer, x)`` is the loss."""

    def __init__(self, function, shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))
        self.register_buffer("buffer", torch.randn(shape))

    def forward(self, x):
        return self.function(self.weight, self.buffer, x)


def rows_written_then_reversed(w, b, x):  # pytorch #198270
    b.index_put_((torch.arange(4),), b * 2 + x)
    b.add_(b.flip(0))
    return (w * b).square().mean()


def rows_written_then_centered(w, b, x):
    b[torch.tensor([1, 3])] = x[:2]
    b.sub_(b.mean(0))
    return (w * b).square().mean()


def clone_for_an_operator_that_writes(w, b, x):  # pytorch #198031
    torch.ops.stepgraph_tests.reversed_into(b.clone(), b)
    b.add_(b.flip(0) * x)
    return (w * b).square().mean()


def gradient_of_cummax(w, b, x):  # pytorch #185509: backward read it before it was scattered
    largest = (w * x).exp().cummax(1).values.sum()
    norms = torch.sin(w * x).norm(p=torch.inf) + torch.linalg.vector_norm((w * x).exp(), torch.inf, dim=1).sum()
    return largest + norms + torch.dist(torch.sin(w), x, torch.inf)


def gradient_of_max_pool(w, b, x):  # pytorch #185509
    y = F.interpolate(x[None, None], scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)[..., 1:7, 1:8]
    y = F.conv2d(y, w[None, None, :3, :3], padding=1)
    pooled = F.max_pool2d(y, 3, 1, 1)
    return torch.where(y > pooled.mean((2, 3), keepdim=True), y, pooled).sum()


def remainders(w, b, x):  # pytorch #198057
    divisors = torch.where(x > 0, x + 0.1, torch.inf)
    rests = torch.remainder(x * 1e3, divisors).clamp(max=1e3)  # of a negative number by inf it is inf
    return (w * rests).sum() + (w * torch.remainder(w.detach() * 1e15, 3.0)).sum()


def floor_divisions(w, b, x):
    tenths = (x * 10).round() / 10
    return (w * (tenths // 0.1)).sum() + (w * torch.div(x, torch.inf, rounding_mode="floor")).sum()


def functions_near_zero(w, b, x):
    small = x * 10.0 ** (torch.arange(37) * -0.8)
    near = [torch.expm1(small), torch.erf(small), torch.atanh(small), F.elu(small)]
    b.copy_(sum(value / small for value in near))
    return (w * x).mean()


def values_at_the_ends(w, b, x):
    nothing = torch.where(x > 0, torch.nan, x)
    b.copy_(F.softshrink(nothing) + torch.sgn(torch.complex(x * 0, x * 0)).real)
    b.add_(torch.addmm(nothing, x, x.T @ x, beta=0))
    return F.smooth_l1_loss(w, x) + (w - x).bfloat16().abs().amax(1).float().sum()


def comparisons_of_rounded_values(w, b, x):
    for dim in (0, 1):
        y = (x * 1.375).bfloat16()
        most = y.amax(dim, keepdim=True)
        b.add_((y >= most) + (y < most) * 4.0 + (y.float() > most.float()) * 16.0)
    tenths = ((x * 5).round() / 10).bfloat16()
    b.add_(
        (tenths == 0.1) + (tenths > 0.3) * 4.0 + (tenths.half() <= 0.2) * 16.0 + (tenths.clamp(max=0.7) == 0.7) * 64.0
    )
    return (w * x).sum()


def what_a_cast_loses(w, b, x):
    high = x.bfloat16()
    low = (x - high.float()).half()  # of a product a GPU would not round the one that it subtracts from
    b.copy_(low + (x.double() - x.double().float().double()) + (x - x.bfloat16()) * 1e3)
    return (w * (high.float() + low.float() * 1e3)).sum()


def diagonals_of_a_copy(w, b, x):
    b.copy_(torch.diagonal_scatter(w, x[0, :4], 3))
    return (torch.diagonal_scatter(w, x[0, :4], 3) * x).sum()


def products_with_zero(w, b, x):
    x = torch.where(x > 0, torch.nan, x)
    zeros = [x * 0, x * False, torch.add(w, x, alpha=0), 0 * x.sum(), (x.bfloat16() * 0).float()]
    return sum(zero.isnan().sum() for zero in zeros) * w.sum() + (w * torch.signbit(x * 0)).sum()


CASES = {
    rows_written_then_reversed: (4, 8),
    rows_written_then_centered: (4, 8),
    clone_for_an_operator_that_writes: (4, 8),
    gradient_of_cummax: (4, 37),
    gradient_of_max_pool: (8, 8),
    remainders: (4, 8),
    floor_divisions: (4, 37),
    functions_near_zero: (4, 37),
    values_at_the_ends: (4, 37),
    comparisons_of_rounded_values: (64, 96),
    what_a_cast_loses: (4, 37),
    diagonals_of_a_copy: (4, 37),
    products_with_zero: (4, 8),
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_step_is_what_eager_computes(function):
    compare(function, CASES[function])


def compare(function, shape):
    torch.manual_seed(0)
    eager = Step(function, shape)
    captured = copy.deepcopy(eager)
    batches = [torch.randn(shape) for _ in range(2)]
    step = stepgraph.capture(captured, lambda model, x: model(x), batches[0])
    for x in batches:
        expected = eager(x)
        expected.backward()
        torch.testing.assert_close(step(x), expected.detach(), rtol=1e-5, atol=1e-5)  # sums of some hundred terms
    torch.testing.assert_close(captured.weight.grad, eager.weight.grad)
    torch.testing.assert_close(captured.buffer, eager.buffer, equal_nan=True)

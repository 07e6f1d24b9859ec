"""The reference against autograd through torch's own norms in float64: the contract that kernels are tested with."""

import itertools

import pytest
import torch

from stepgraph.kernels.norm import planned, reference
from stepgraph.kernels.norm.spec import Norm, check, default_eps
from tests.kernels.norm.cases import EPS, close, exact, rows

F64 = torch.float64


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_backward_in_float64(kind, per_head, needs):
    """Formulas only: in float64 they agree with autograd to its rounding, whichever outputs are asked for."""
    norm = Norm(kind, EPS, 1.0, F64)
    x = rows(3, 4, 8, dtype=F64, grad=True)
    weight, bias = (rows(*((4, 8) if per_head else (8,)), dtype=F64, seed=s, grad=True) for s in (1, 2))
    dy, dh = rows(3, 4, 8, dtype=F64, seed=3), rows(3, 4, 8, dtype=F64, seed=4)
    y, h = exact(kind, x, weight, bias, None, 1.0)
    expected = torch.autograd.grad([y, h], [x, weight, bias], [dy, dh])
    x, weight = x.detach(), weight.detach()
    _, _, mean, rstd = reference.forward(norm, x, weight, bias.detach(), None, True)
    ours = reference.backward(norm, dy, x, weight, mean, rstd, dh, F64, *needs)
    for gradient, truth, needed in zip(ours, expected, needs, strict=True):
        assert (gradient is not None) == needed
        if needed:
            torch.testing.assert_close(gradient, truth)


def test_norm_is_of_the_rounded_sum():
    """Backward reads h: what forward normalized must be that, to the bit."""
    norm = Norm("rms", EPS, 0.0, torch.float32)
    x, residual = rows(64, 32), rows(64, 32, seed=1, dtype=torch.bfloat16)
    y, h, _, rstd = reference.forward(norm, x, None, None, residual, True)
    assert h.dtype == torch.bfloat16 and torch.equal(h, (x + residual.float()).bfloat16())
    assert torch.equal(y, h.float() * rstd[:, None])
    assert reference.forward(norm, x, None, None, residual, False)[1] is None


def test_half_precision_does_not_overflow():
    """The square of 60000 is beyond float16; the sum is taken in float32."""
    x = torch.full((2, 128), 60000.0, dtype=torch.float16)
    y = reference.forward(Norm("rms", EPS, 0.0, torch.float16), x, None, None, None, False)[0]
    close(y, torch.ones(2, 128), 128)


def test_offset_is_added_in_float32():
    """1 + 2^-10 is not a bfloat16, but must reach the product."""
    weight = torch.full((8,), 2.0**-10, dtype=torch.bfloat16)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    y = reference.forward(Norm("rms", 0.0, 1.0, torch.float32), x, weight, None, None, False)[0]
    assert torch.equal(y, torch.full((1, 8), 1 + 2.0**-10))


def test_norm_is_cheap_to_hash_and_compare():
    assert Norm("rms", 1e-5, 0.0, F64) == Norm("rms", 1e-5, 0.0, F64)
    assert len({Norm("rms", 1e-5, 0.0, F64), Norm("rms", 1e-5, 0.0, F64), Norm("layer", 1e-5, 0.0, F64)}) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_a_plan_is_found_by_all_that_the_check_asks(dtype, monkeypatch):
    """A call is checked when its plan is made: calls of one key must all pass, or all be refused."""
    monkeypatch.setattr(planned, "PLANS", {})

    def passes(*arguments):
        try:
            check(*arguments)
        except ValueError:
            return False
        return True

    shapes = [(8,), (4, 8), (2, 4, 8), (4, 1), ()]
    xs = [rows(*s).to(dtype) for s in shapes] + [rows(4, 8).t().to(dtype), torch.zeros(4, 8, dtype=torch.int32)]
    weights = [None, rows(8), rows(4, 8), rows(1), rows(8).long(), torch.empty(8, device="meta")]
    for x, weight, bias, residual, out in itertools.product(
        [*xs, rows(4, 8).to(dtype)], weights, [None, rows(8)], [None, *xs], [dtype, torch.int8, torch.float8_e4m3fn]
    ):
        call = Norm("rms", default_eps(dtype), 0.0, out), x, weight, bias, residual
        assert planned.planned(passes, call[:1], *call[1:]) == passes(*call)
    assert set(planned.PLANS.values()) == {True, False}


def test_another_kind():
    with pytest.raises(ValueError, match="norm kind 'group' is unknown; allowed are 'rms' and 'layer'"):
        check(Norm("group", 1e-5, 0.0, torch.float32), rows(4, 8), None, None, None)

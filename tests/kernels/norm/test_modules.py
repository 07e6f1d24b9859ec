"""The modules next to torch's own: constructors, state dicts, results."""

import copy

import pytest
import torch

from stepgraph.kernels import LayerNorm, RMSNorm
from tests.kernels.norm.cases import close, rows

PAIRS = [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)]


def options():
    common = [
        ((8,), {}),
        (([8],), {"eps": 1e-3}),
        ((torch.Size([3, 8]),), {"elementwise_affine": True}),
        ((8, 1e-6, False), {}),
        ((8,), {"dtype": torch.bfloat16, "device": "cpu"}),
        ((8,), {"dtype": torch.float64}),
    ]
    cases = [(pair, *case) for pair in PAIRS for case in common]
    return cases + [
        (PAIRS[1], (8,), {"bias": False}),
        (PAIRS[0], (8,), {"eps": None}),
        (PAIRS[1], ((3, 8),), {"bias": False}),
    ]


@pytest.mark.parametrize(("pair", "args", "kwargs"), options())
def test_drops_in(pair, args, kwargs):
    ours, theirs = (cls(*args, **kwargs) for cls in pair)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert isinstance(ours, pair[1]) and repr(ours) == repr(theirs)

    shape = theirs.normalized_shape
    x = rows(2, 5, *shape, dtype=kwargs.get("dtype", torch.float32), grad=True)
    reference = copy.deepcopy(theirs).double()
    reference.eps = theirs.eps if theirs.eps is not None else torch.finfo(torch.float32).eps
    if kwargs.get("dtype") == torch.float64:
        reference.eps = theirs.eps
    x64 = x.detach().double().requires_grad_()
    y, expected = ours(x), reference(x64)
    close(y, expected, 24)
    dy = rows(*y.shape, seed=1).to(y.dtype)
    y.backward(dy)
    expected.backward(dy.double())
    # Gradients are of order rstd * weight * 4.
    close(x.grad / 4, x64.grad / 4, 24)
    for name, parameter in reference.named_parameters():
        close(ours.get_parameter(name).grad, parameter.grad, 24, 10)


def test_residual_and_prenorm():
    module = LayerNorm((3, 8))
    x, r = rows(2, 3, 8), rows(2, 3, 8, seed=1)
    y, h = module(x, r, prenorm=True)
    assert torch.equal(h, x + r) and y.shape == x.shape
    close(y, torch.nn.LayerNorm((3, 8)).double()((x + r).double()), 24)
    assert torch.equal(module(x, r), y)


def test_offset_starts_as_no_weight():
    module = RMSNorm(8, weight_offset=1.0)
    assert torch.equal(module.weight, torch.zeros(8))
    assert torch.equal(module(rows(4, 8)), RMSNorm(8)(rows(4, 8)))


@pytest.mark.parametrize("module", [RMSNorm(8, elementwise_affine=False), LayerNorm((3, 8))])
def test_refuses_another_shape(module):
    with pytest.raises(ValueError, match=r"input has shape \(4, 7\); allowed is \(\.\.\., .*8\): reshape"):
        module(rows(4, 7))


def test_compiles_in_one_graph():
    torch.compiler.reset()
    model = torch.nn.Sequential(RMSNorm((3, 8)), LayerNorm(8))
    x = rows(5, 3, 8)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))

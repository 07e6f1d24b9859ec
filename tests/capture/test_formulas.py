"""Gradients of single operators are eager's, bit for bit: where torch has another formula for traces, and in a sweep
over torch's own list of operators."""

import copy
import sys
import types
import unittest

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph
from stepgraph import CaptureError
from stepgraph.graph.partition import needs_host

MASK = torch.arange(40).view(8, 5) % 3 > 0


def zeros(y, n):
    """``y`` with ``n`` zeros, in different columns."""
    return y * (torch.arange(40).view(8, 5) >= 7 * n).where(torch.arange(40).view(8, 5) % 7 == 0, True)


FUNCTIONS = {
    "prod": lambda m, y: y[:3].prod(),
    "prod_dim": lambda m, y: y.prod(0),
    "prod_keepdim": lambda m, y: torch.prod(y, -1, keepdim=True),
    "prod_dtype": lambda m, y: y.prod(0, dtype=torch.float64),
    "prod_of_scalar": lambda m, y: y.sum().prod() * y.mean().prod(0),
    "prod_one_zero": lambda m, y: zeros(y, 1)[:3].prod() + zeros(y, 1).prod(1),
    "prod_two_zeros": lambda m, y: zeros(y, 2)[:3].prod() + zeros(y, 2).prod(0).sum(),
    "prod_autocast": lambda m, y: autocast(lambda: (y @ y.T).prod(0) + y.bfloat16().prod(1)),
    "cumprod": lambda m, y: y.cumprod(0) + torch.cumprod(y, -1, dtype=torch.float64).float(),
    "cumprod_dtype": lambda m, y: y.cumprod(1, dtype=torch.bfloat16).float(),
    "cumprod_": lambda m, y: y.clone().cumprod_(1) + (y * 2).cumprod_(dim=0),
    "vander": lambda m, y: torch.linalg.vander(y).sum(-1) + torch.linalg.vander(y[0], N=4).sum(),
    "cumprod_zeros": lambda m, y: zeros(y, 1).cumprod(0) + zeros(y, 4).cumprod(1),
    "cumprod_penalty": lambda m, y: torch.autograd.grad(y.cumprod(1).sum(), y, create_graph=True)[0].square(),
    "named": lambda m, y: (
        torch.cumprod(input=y, dim=1)
        + torch.prod(input=y, dim=0)
        + torch.masked_fill(input=y, mask=MASK, value=m.bias[0])
        + torch.index_put(input=y, indices=(MASK,), values=m.bias[1])
    ),
    "masked_prod": lambda m, y: torch.masked.prod(y, 1, mask=MASK),
    "masked_fill": lambda m, y: y.masked_fill(MASK, m.bias[0]),
    "masked_fill_": lambda m, y: (y * 1).masked_fill_(MASK[:, :1], m.bias[1]),
    "masked_fill_view": lambda m, y: masked_view(m, y * 1),
    "set_item": lambda m, y: set_item(y * 1, y.detach() > 0, m.bias[3]),
    "set_item_row": lambda m, y: set_item(y * 1, y.detach()[:, 0] > 0, m.bias[None]),
    "set_item_column": lambda m, y: set_item(y * 1, (slice(None), y.detach()[0] > 0), m.weight[:1, :1] * 2),
    "index_put": lambda m, y: y.index_put([y.detach() > 0], m.bias[1]) + y,
    "masked_scatter": lambda m, y: y.masked_scatter(y.detach() > 0, torch.outer(m.bias, m.weight.flatten())),
    "masked_scatter_": lambda m, y: (y * 1).masked_scatter_(MASK[:, :1], torch.outer(m.bias, m.weight.flatten())).sin(),
    "masked_fill_frozen": lambda m, y: y * torch.ones(8, 5).masked_fill_(MASK, m.bias[2]),
    "penalty": lambda m, y: torch.autograd.grad(y.prod(0).sum(), y, create_graph=True)[0].square(),
    "vmap": lambda m, y: torch.func.vmap(torch.func.grad(lambda row: row.prod()))(y),
}


def autocast(function):
    with torch.autocast("cpu", torch.bfloat16):
        return function().float()


def set_item(y, index, value):
    y[index] = value
    return y.sin()


def masked_view(m, y):
    y[1:].masked_fill_(MASK[1:], m.bias[0] * 2)
    return y.sin()


def compare(make_loss, model, x):
    """Raise unless loss and gradients of ``make_loss(model, x)`` are eager's."""
    eager = copy.deepcopy(model)
    loss = make_loss(eager, x)
    loss.backward()
    step = stepgraph.capture(model, make_loss, x, passes="exact")
    assert torch.equal(step(x), loss.detach())
    for a, b in zip(eager.parameters(), model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or a.grad.equal(b.grad)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_formulas_of_eager(name, seed):
    torch.manual_seed(seed)
    model, x = nn.Linear(5, 5), torch.randn(8, 5)

    def loss_fn(model, x):
        y = FUNCTIONS[name](model, model(x))
        return (y * torch.linspace(0.3, 1.1, y.numel()).view(y.shape)).sum().float()

    compare(loss_fn, model, x)


@pytest.mark.parametrize("name", ["masked_scatter", "masked_scatter_"])
def test_a_gradient_of_masked_scatter_needs_no_host(name):
    model, x = nn.Linear(5, 5), torch.randn(8, 5)
    step = stepgraph.capture(model, lambda model, x: FUNCTIONS[name](model, model(x)).sum(), x, passes="exact")
    assert not [needs_host(node, gpu="cpu") for node in step.graph.graph.nodes if needs_host(node, gpu="cpu")]


VALUES = {
    "svdvals": lambda y: torch.linalg.svdvals(y),
    "norm": lambda y: torch.linalg.matrix_norm(y, 2),
    "eigvalsh": lambda y: torch.linalg.eigvalsh(y.T @ y),
    "vectors": lambda y: torch.linalg.svd(y, full_matrices=False)[0].abs(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_alone_where_no_gradient_needs_vectors(name):
    """Eager takes another algorithm for values alone, and looks whether gradients need vectors."""

    def loss_fn(model, x):
        y = model(x)
        with torch.no_grad():
            factor = VALUES[name](y).sum()
        return y.sum() * factor + VALUES[name](y).sum()

    torch.manual_seed(0)
    compare(loss_fn, nn.Linear(3, 5), torch.randn(8, 3))


def test_values_under_a_re_entrant_checkpoint_are_refused():
    def loss_fn(model, x):
        return checkpoint(torch.linalg.svdvals, model(x), use_reentrant=True).sum()

    with pytest.raises(CaptureError, match="use_reentrant=False"):
        stepgraph.capture(nn.Linear(3, 5), loss_fn, torch.randn(8, 3), passes="exact")


def operators() -> list:
    """torch's list of operators with sample inputs; importing it needs one name of a package for tests."""
    if "expecttest" not in sys.modules:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")]


#: Eager does not repeat itself, or reads memory that nothing wrote.
LEFT_OUT = ("empty", "resize", "new_empty", "nn.functional.ctc_loss", "svd_lowrank", "pca_lowrank", "rand", "bernoulli")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocasting", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_every_operator_of_torch(part, autocasting):
    differ, tried = [], 0
    for op in operators()[part::4]:
        if any(word in op.name for word in LEFT_OUT):
            continue
        for i, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
            if i == 3 or not isinstance(sample.input, torch.Tensor) or not sample.input.requires_grad:
                break
            model = nn.ParameterList([nn.Parameter(sample.input.detach().clone())])

            def loss_fn(model, x, op=op, sample=sample):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocasting):
                    made = op(model[0] * 1.0, *sample.args, **sample.kwargs)
                leaves = made if isinstance(made, (list, tuple)) else [made]
                parts = [t.abs().float() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
                return sum((p * torch.linspace(0.3, 1.1, p.numel()).view(p.shape)).sum() for p in parts)

            try:
                torch.manual_seed(0)
                loss_fn(copy.deepcopy(model), None).backward()
            except Exception:
                continue
            try:
                compare(loss_fn, model, torch.zeros(1))
                tried += 1
            except (CaptureError, AssertionError) as error:
                if not isinstance(error, CaptureError):
                    differ.append((op.name, op.variant_test_name, i))
            except Exception as error:
                differ.append((op.name, op.variant_test_name, i, type(error).__name__, str(error)[:200]))
    assert tried > 100 and not differ

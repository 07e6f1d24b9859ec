"""Operators of the user that give other tensors than their fake implementations say."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph import CaptureError


def operator_of(name, function):
    made = torch.library.custom_op(f"stepgraph_test_foreign::{name}", mutates_args=())(function)
    made.register_fake(lambda x: torch.empty_like(x))
    made.register_autograd(lambda ctx, grad: grad.float() * 2)
    return made


def strides(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double()


def right(x: torch.Tensor) -> torch.Tensor:
    return x * 2


STRIDES, DTYPE, RIGHT = (operator_of(one.__name__, one) for one in (strides, dtype, right))
#: (loss, what is said); memory read by wrong strides, and a float64 read as float32, gave wrong numbers.
WRONG = {
    "strides": (
        lambda model, x: (STRIDES(model(x)).as_strided((24,), (1,)) * torch.arange(24)).mean(),
        r"gives float32\[6, 4\] with strides \[1, 6\] on cpu, and .* says float32\[6, 4\] with strides \[4, 1\] on cpu",
    ),
    "dtype": (lambda model, x: DTYPE(model(x)).cos().mean(), r"gives float64\[6, 4\] .* says float32\[6, 4\]"),
}


@pytest.mark.parametrize("passes", ["exact", pytest.param("default", marks=pytest.mark.long)])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_fake_implementations(wrong, passes):
    loss_fn, message = WRONG[wrong]
    step = stepgraph.capture(nn.Linear(4, 4), loss_fn, torch.randn(6, 4), passes=passes)
    with pytest.raises(CaptureError, match=rf"foreign.py:\d+\) calls \S*{wrong}.default, which {message}") as caught:
        step(torch.randn(6, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_right_one_is_compared_once(accumulate, monkeypatch):
    from stepgraph.run import program

    made, form = [], program._form
    monkeypatch.setattr(program, "_form", lambda tensor: made.append(tensor) or form(tensor))
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    step = stepgraph.capture(model, lambda model, x: RIGHT(model(x)).mean(), x, accumulate=accumulate, passes="exact")
    losses = [step(x) for _ in range(3)]
    assert len(made) == 2 * accumulate and all(torch.equal(loss, losses[0]) for loss in losses)

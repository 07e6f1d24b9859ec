"""`alike` sees every difference that it says it sees."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.compat import alike, in_plain_eager


def pair() -> tuple[torch.Tensor, torch.nn.Parameter]:
    return torch.zeros(4, 8, requires_grad=True), torch.nn.Parameter(torch.ones(8))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8),
        torch.zeros(4, 8, dtype=torch.float64, requires_grad=True),
        torch.zeros(5, 8, requires_grad=True),
        torch.zeros(32, requires_grad=True),
        torch.zeros(8, 4, requires_grad=True).t(),
        torch.zeros(4, 16, requires_grad=True)[:, :8],
        torch.zeros(4, 8, requires_grad=True, device="meta"),
        torch.nn.Parameter(torch.zeros(4, 8)),
        [0.0],
    ],
    ids=["gradient", "dtype", "size", "dimensions", "transposed", "slice", "device", "type", "no tensor"],
)
def test_other_tensors_are_not_alike(other):
    (x, w), (x2, w2) = pair(), pair()
    check = alike(x, w)
    assert check(x, w) and check(x2, w2) and not check(other, w) and not check(w, x)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_other_states_are_not_alike():
    x, w = pair()
    check, seen = alike(x, w), []
    with torch.autocast("cpu", torch.bfloat16):
        seen.append(check(x, w))
    with torch.inference_mode():
        seen.append(check(x, w))
    with Mode():
        seen.append(check(x, w))
        assert not in_plain_eager()
    torch.func.grad(lambda z: seen.append(check(x, w)) or seen.append(check(z, w)) or z.sum())(x)
    torch.func.vmap(lambda z: seen.append(check(z, w)) or z)(torch.zeros(3, 4, 8))
    assert len(seen) == 6 and not any(seen) and check(x, w)


def test_no_tensor_is_kept():
    x, w = pair()
    check = alike(x, w)
    kept = weakref.ref(x), weakref.ref(w)
    del x, w
    gc.collect()
    assert kept[0]() is None and kept[1]() is None and check(*pair())

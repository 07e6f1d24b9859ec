"""Where an eager call may bypass the dispatcher."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.compat import in_plain_eager


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_modes_and_transforms_are_not_plain_eager():
    seen, x = [], torch.zeros(3)

    def plain(y: torch.Tensor | None = None) -> bool:
        return in_plain_eager(x, None, y, torch.nn.Parameter(x))

    with Mode():
        seen.append(plain())
    torch.func.grad(lambda z: seen.append(plain()) or z.sum())(x)
    torch.func.vmap(lambda z: seen.append(plain()) or z)(torch.zeros(3, 4))
    seen += [
        plain(torch.zeros(3).as_subclass(Subclass)),
        in_plain_eager(torch.empty(3, device="meta"), None, None, None),
    ]
    assert seen == [False] * 5 and plain()

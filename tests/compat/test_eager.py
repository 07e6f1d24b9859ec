"""Where an eager call may bypass the dispatcher."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.compat import in_plain_eager


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_modes_and_transforms_are_not_plain_eager():
    seen = []
    with Mode():
        seen.append(in_plain_eager())
    torch.func.grad(lambda z: seen.append(in_plain_eager()) or z.sum())(torch.zeros(3))
    torch.func.vmap(lambda z: seen.append(in_plain_eager()) or z)(torch.zeros(3, 4))
    assert seen == [False] * 3 and in_plain_eager()

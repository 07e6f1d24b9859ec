"""Operators of torch whose kernels wait for the GPU: needs_host knows all that torch's own list of operators meets."""

import contextlib
import sys
import types
import unittest
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graph.partition import _SELECTING, WAITING

PARTS = 4


class Forbidden(TorchDispatchMode):
    """Collects operators that synchronize, except copies to and from the host and operators whose tags say so."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            tagged = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
            hosted = func is torch.ops.aten._to_copy.default or any(not x.is_cuda for x in tensors)
            if not (tagged or hosted or func in WAITING or func.overloadpacket in _SELECTING):
                self.found.add(str(func))
            torch.cuda.set_sync_debug_mode("default")
            return func(*args, **(kwargs or {}))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_that_wait_are_known(part, monkeypatch):
    if "expecttest" not in sys.modules:  # torch's lists import it for tests of its own
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    mode, ran = Forbidden(), 0
    for op in op_db[part::PARTS]:
        # Some have no sample for a GPU, or raise as they are meant to; what ran is counted. torch.linspace of tensors
        # calls item() inside, so that no trace has it.
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            for sample, _ in zip(op.sample_inputs("cuda", torch.float32, requires_grad=True), range(3), strict=False):
                with mode:
                    found = op(sample.input, *sample.args, **sample.kwargs)
                    outputs = [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
                    outputs = [x for x in outputs if x.requires_grad]
                    if outputs:
                        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
                ran += 1
    assert ran > 200
    assert not {name for name in mode.found if not name.startswith(("aten.linspace", "aten.logspace"))}

"""Names of our operators' arguments in Inductor, which hands them on as keywords."""

import importlib
import inspect
import pkgutil

import torch
from torch._inductor.ir import FallbackKernel

import stepgraph.kernels
from stepgraph.kernels.moe import grouped_mm


def test_none_is_a_name_that_inductor_takes_for_itself():
    """``kernel``, which is one, failed on GPUs alone: ``got multiple values for argument 'kernel'``."""
    for module in pkgutil.walk_packages(stepgraph.kernels.__path__, "stepgraph.kernels."):
        if not module.name.endswith(("_triton", "quack", "flash4")):
            importlib.import_module(module.name)
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("stepgraph::")]
    taken = set(inspect.signature(FallbackKernel.create).parameters) - {"args", "kwargs"}
    assert len(schemas) > 20 and taken
    assert [(s.name, a.name) for s in schemas for a in s.arguments if a.name in taken] == []


def test_a_default_given_by_name_compiles():
    rows, weight = torch.randn(8, 16), torch.randn(2, 16, 24)
    offsets = torch.tensor([3, 8], dtype=torch.int32)

    def product(rows, weight, offsets):
        return torch.ops.stepgraph.grouped_mm(rows, weight, offsets, zero_rest=True) * 2

    compiled = torch.compile(product, fullgraph=True)(rows, weight, offsets)
    assert torch.equal(compiled, grouped_mm(rows, weight, offsets) * 2)

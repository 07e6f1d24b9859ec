"""Names of our operators' arguments in Inductor, which hands them on as keywords."""

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
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

    own = {"fx_graph_cache": False}  # torch takes code of another version of an operator for this one's
    compiled = torch.compile(product, fullgraph=True, options=own)(rows, weight, offsets)
    assert torch.equal(compiled, grouped_mm(rows, weight, offsets) * 2)


SCRIPT = """
import sys, torch
import stepgraph

@torch.library.custom_op("of_tests::twice", mutates_args=(), schema=sys.argv[1])
def twice(x, *options):
    return 2 * x

twice.register_fake(lambda x, *options: torch.empty_like(x))

def loss(model, x):
    return (model(x) + torch.ops.of_tests.twice(x)).sin().mean()

step = stepgraph.capture(torch.nn.Linear(4, 4), loss, torch.ones(2, 4), passes=["inductor"])
step(torch.ones(2, 4))
print(step.report[-1].summary)
"""


@pytest.mark.slow
def test_code_that_was_compiled_for_another_schema_is_not_called(tmp_path):
    """Inductor's cache on disk would give it: the graphs differ in nothing but what an operator takes."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(stepgraph.__file__).parents[1])

    def run(schema):
        command = [sys.executable, "-c", SCRIPT, schema]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "loaded from disk" in run("(Tensor x, bool given=True) -> Tensor")
    assert "(1 of 1 loaded" in run("(Tensor x, bool given=True) -> Tensor")
    assert "(0 of 1 loaded" in run("(Tensor x) -> Tensor")

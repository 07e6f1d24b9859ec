"""Every operator takes the strides that come, and its fake says what it gives."""

import pytest
import torch

from tests.kernels import strides

DTYPES = [torch.float32, torch.bfloat16]
CALLS = {f"{name} {dtype}": call for dtype in DTYPES for name, *call in strides.calls("cpu", dtype)}


@pytest.mark.parametrize("name", CALLS)
def test_any_strides(name):
    strides.check_call(name, *CALLS[name])


def test_every_operator_is_there():
    """Those of exchanges need ranks: their inputs are made contiguous, see `tests/distributed`."""
    torch_names = {str(call[0]) for call in CALLS.values()}
    made = set(torch._C._dispatch_get_all_op_names())
    ours = {name.split(".")[0].replace("::", ".") for name in made if name.startswith("stepgraph::")}
    apart = {"gather", "reduce", "matmul"}  # of exchanges
    assert {name for name in ours if not any(word in name for word in apart)} == torch_names

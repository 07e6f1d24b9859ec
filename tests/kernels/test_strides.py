"""Every operator takes the strides that come, and its fake says what it gives."""

import ast
import re
from pathlib import Path

import pytest
import torch

import stepgraph
from tests.kernels import strides

DTYPES = [torch.float32, torch.bfloat16]
CALLS = {f"{name} {dtype}": call for dtype in DTYPES for name, *call in strides.calls("cpu", dtype)}


@pytest.mark.parametrize("name", CALLS)
def test_any_strides(name):
    strides.check_call(name, *CALLS[name])


def test_every_operator_is_there():
    """Of norms, losses, embeddings and experts; the others have their tests next to them."""
    rooms = Path(stepgraph.__file__).parent / "kernels"
    sources = [
        file.read_text() for room in ("norm", "loss", "embedding", "moe") for file in (rooms / room).glob("*.py")
    ]
    made = {name for text in sources for name in re.findall(r'define\(\s*"stepgraph::(\w+)"', text)}
    for function in (node for text in sources for node in ast.walk(ast.parse(text)) if hasattr(node, "decorator_list")):
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "operator":
                made |= {next((ast.literal_eval(k.value) for k in call.keywords if k.arg == "name"), function.name)}
    assert {f"stepgraph.{name}" for name in made} == {str(call[0]) for call in CALLS.values()}

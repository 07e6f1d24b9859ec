"""Arguments of wrong types, given to public functions: one line says what was given and what is allowed."""

import pytest
import torch
from torch import nn

from stepgraph.integrations import PadToLengths
from stepgraph.kernels.quant import quantize_linear
from stepgraph.parallel import Mesh, MeshSpec, mean_over_mesh, next_token_loss, parallelize

MODEL = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MeshSpec.parse(2), "mesh is of type int, not str: write it as in 'fsdp=2'"),
        (lambda: Mesh("fsdp=2", "cpu"), "spec is of type str, not MeshSpec: use MeshSpec.parse"),
        (lambda: parallelize(MODEL, "fsdp=2"), "mesh is of type str, not Mesh: use Mesh"),
        (lambda: next_token_loss("fsdp=2"), "mesh is of type str, not Mesh"),
        (lambda: mean_over_mesh(torch.ones(()), None), "mesh is of type NoneType, not Mesh"),
        (lambda: quantize_linear(None, "nf4"), "model is of type NoneType, not Module"),
        (lambda: quantize_linear(MODEL, "nf4", skip="0"), "skip='0' is one word"),
        (lambda: quantize_linear(MODEL, "nf4", skip=["head"]), "skip names 'head', and the model has no such module"),
        (lambda: PadToLengths((8,), 3), "collate is of type int, not Callable"),
        (lambda: PadToLengths((8,), fill=3), "fill is of type int, not Mapping"),
        (lambda: PadToLengths((8,))([1]), "the batch is of type list, not Mapping: let collate return a dict"),
    ],
)
def test_a_wrong_type_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in f"{error.value}"

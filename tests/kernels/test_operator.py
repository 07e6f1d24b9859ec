"""How operators are defined: what the code that launches a kernel is given, and that there is such code."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import stepgraph
from stepgraph.kernels.operator import _found, operator

ROOM = Path(stepgraph.__file__).parent / "kernels"
LAUNCHES = {
    node.value
    for file in ROOM.rglob("*.py")
    for keyword in ast.walk(ast.parse(file.read_text()))
    if isinstance(keyword, ast.keyword) and keyword.arg == "launch"
    for node in [keyword.value]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
}


@pytest.mark.parametrize("launch", sorted(LAUNCHES))
def test_the_code_that_launches_is_there(launch):
    """It is named by text, because a CPU does not import it."""
    pytest.importorskip("triton")
    assert callable(_found(launch))


def test_there_are_launches():
    assert len(LAUNCHES) > 15


def test_a_launch_gets_what_torch_leaves_out(monkeypatch):
    """torch does not hand on arguments that equal their defaults."""
    given, checked = [], []

    def launch(*args):
        given.append(args[1:])
        return args[0] + 1

    def add(x: torch.Tensor, times: int, twice: bool = True, other: torch.Tensor | None = None) -> torch.Tensor:
        return x.clone()

    made = operator(
        lambda x, times, twice, other: x.new_empty(x.shape), launch=launch, takes=lambda x: x.numel() > 1,
        check=lambda *args: checked.append(len(args)), name="test_launch_defaults",
    )(add)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    x = torch.zeros(2)
    for call in (lambda: made(x, 3), lambda: made(x, 3, True, None), lambda: made(x, 3, twice=False)):
        call()
    assert given == [(3, True, None), (3, True, None), (3, False, None)] and set(checked) == {4}
    assert torch.equal(made(torch.zeros(1), 3), torch.zeros(1))

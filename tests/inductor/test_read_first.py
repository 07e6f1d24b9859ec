"""Compiled pieces that read an input and write it, in an order that Inductor does not keep."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.inductor.regional import Piece, Region, compile_pieces

pytestmark = pytest.mark.slow


def copied_then_written(a, b, c):
    a.add_(b)
    c.copy_(b)
    b.neg_()


def copied_through_a_view(a, b, c):
    a.add_(b)
    c.copy_(b.t())
    b.copy_(a)


def swapped(a, b, c):
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def a_part_changed_after_the_copy(a, b, c):
    a.add_(b)
    c.copy_(b)
    b[20:].neg_()


def a_copy_with_a_part_changed(a, b, c):
    kept = b.clone()
    kept[20:].neg_()
    b.copy_(a)
    return kept


def a_copy_kept_in_another(a, b, c):
    kept = b.clone()
    kept[20:].neg_()
    c.copy_(kept)
    b.copy_(a)


def shifted(a, b, c):
    b[1:] = b[:-1].clone()


def transposed(a, b, c):
    b.t().copy_(b * 2)


def reversed_as_one_row(a, b, c):
    b.copy_(b.reshape(-1).flip(0).view(40, 40))


@pytest.mark.parametrize(
    "function",
    [
        copied_then_written,
        copied_through_a_view,
        swapped,
        a_part_changed_after_the_copy,
        a_copy_with_a_part_changed,
        a_copy_kept_in_another,
        shifted,
        transposed,
        reversed_as_one_row,
    ],
)
def test_a_piece_reads_what_eager_reads(function):
    inputs = torch.randn(3, 40, 40).unbind()
    module = make_fx(function, tracing_mode="fake")(*(x.clone() for x in inputs))
    piece = Piece(Region("r", "test"), [node for node in module.graph.nodes if node.op == "call_function"])
    compiled = compile_pieces(module, [piece], {}).module
    eager, ours = ([x.clone() for x in inputs] for _ in range(2))
    expected, result = function(*eager), compiled(*ours)
    assert not all(map(torch.equal, eager, inputs))
    torch.testing.assert_close([ours, result], [eager, expected])

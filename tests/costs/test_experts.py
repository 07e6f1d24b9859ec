"""Products of experts' rows: FLOPs of the rows that routing fills, by hand."""

import pytest
import torch

import stepgraph.kernels.moe  # noqa: F401  (registers its operators)
from stepgraph.costs.experts import filled
from stepgraph.costs.flops import flops
from stepgraph.costs.hardware import FP8_REACHED, GPUS, GROUPED_REACHED
from stepgraph.costs.roofline import Fusion, Roofline
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.provenance import Role, set_role
from stepgraph.kernels.moe.packed import TAIL
from tests.costs.graphs import Hand, aten

c10d, ours = torch.ops._c10d_functional, torch.ops.stepgraph
TOKENS, SLOTS, DIM, FFN, HERE, ROWS = 4096, 8, 2048, 1024, 4, 2 * 4096 * 8  # room for twice the balanced load
PRODUCT = 2 * ROWS * DIM * FFN


def layer(kind="dispatch"):
    """Rows gathered, exchanged in a buffer of twice their number, and multiplied, forward and weights' gradient."""
    hand = Hand()
    x = hand.input(TOKENS, DIM, dtype=torch.bfloat16)
    places, order = hand.input(TOKENS, SLOTS, dtype=torch.int32), hand.input(ROWS, dtype=torch.int32)
    weight, offsets = hand.input(HERE, DIM, FFN, dtype=torch.bfloat16), hand.input(HERE, dtype=torch.int32)
    rows = hand(ours.gather_rows.default, x, places, order, ROWS)
    there = hand(c10d.all_to_all_single.default, rows, [ROWS // 2] * 2, [ROWS // 2] * 2, "ep", val=rows.meta["val"])
    set_role(there, Role(kind, (), "ep"))
    y = hand(ours.grouped_mm.default, there, weight, offsets)
    return hand.graph, y, hand(ours.grouped_mm_weight.default, there, y, offsets)


def cost(graph, load):
    aliases = Aliases(graph)
    return Roofline(graph, aliases, Fusion(graph, aliases, fused=False), GPUS["h200"], load)


def test_products_stop_at_the_last_row():
    graph, y, gradient = layer()
    assert flops(y) == flops(gradient) == PRODUCT
    assert filled(graph) == {ROWS: 0.5} and filled(graph, 1.5) == {ROWS: 0.75}
    assert filled(graph, 4) == {ROWS: 1.0}  # no more than there is room for
    for load, share in ((1.0, 0.5), (1.5, 0.75)):
        found = cost(graph, load)
        assert found.flops == 2 * share * PRODUCT
        product = share * PRODUCT / 989.5e12 / GROUPED_REACHED
        assert found.seconds[gradient] == pytest.approx(product)
        assert found.seconds[y] > product  # zeros behind the rows
    y.kwargs = {"zero_rest": False}
    assert cost(graph, 1.5).seconds[y] == pytest.approx(product)


def test_products_of_packed_rows_run_in_fp8():
    hand = Hand()
    rows, ends = hand.input(ROWS, DIM + TAIL, dtype=torch.uint8), hand.input(HERE, dtype=torch.int32)
    weight, scale = hand.input(HERE, FFN, DIM, dtype=torch.float8_e4m3fn), hand.input(HERE, FFN, dtype=torch.float32)
    y = hand(ours.grouped_scaled_mm.default, rows, weight, scale, ends, zero_rest=False)
    assert flops(y) == PRODUCT
    assert cost(hand.graph, 1.0).seconds[y] == pytest.approx(PRODUCT / 1979e12 / FP8_REACHED)


def test_without_an_exchange_every_row_is_filled():
    graph, *_ = layer(kind="combine")
    assert filled(graph) == {} and cost(graph, 1.0).flops == 2 * PRODUCT


def test_torchs_products_count_alike():
    hand = Hand()
    rows, weight = hand.input(64, 16, dtype=torch.bfloat16), hand.input(2, 16, 32, dtype=torch.bfloat16)
    offsets = hand.input(2, dtype=torch.int32)
    y = hand(aten._grouped_mm.default, rows, weight, offsets)
    columns = hand(aten.t.default, rows)
    gradient = hand(aten._grouped_mm.default, columns, y, offsets)
    assert tuple(gradient.meta["val"].shape) == (2, 16, 32)
    assert flops(y) == flops(gradient) == 2 * 64 * 16 * 32


@pytest.mark.parametrize("zero_rest", [True, False])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_swiglu_reads_filled_rows_and_writes_those_or_all(kind, zero_rest):
    graph, y, gradient = layer(kind)
    hand = Hand()
    hand.graph = graph
    with graph.inserting_before(gradient):
        h = hand(ours.swiglu_rows.default, y, gradient.args[2])
        back = hand(ours.swiglu_rows_backward.default, h, y, gradient.args[2])
    for node in (h, back) if not zero_rest else ():
        node.kwargs = {"zero_rest": False}
    half, offsets = ROWS * FFN // 2 * 2, HERE * 4  # bytes of bf16 and of int32
    share = 0.5 if kind == "dispatch" else 1.0
    written = 1.0 if zero_rest else share
    found = cost(graph, 1.0)
    assert found.moved[h] == round(share * (2 * half + offsets)) + written * half
    assert found.moved[back] == round(share * (3 * half + offsets)) + written * 2 * half
    assert flops(h) == flops(back) == 0

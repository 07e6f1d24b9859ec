"""What a compiler would make one kernel, and what that kernel moves."""

import pytest

from stepgraph.costs.hardware import GPUS, MEMORY_REACHED
from stepgraph.costs.roofline import Fusion, Roofline
from stepgraph.graph.aliases import Aliases
from tests.costs.graphs import Hand, aten


def fusion(hand, *outputs):
    graph = hand.step(*outputs).graph
    return Fusion(graph, Aliases(graph), fused=True)


@pytest.mark.parametrize(("phase", "joined"), [("backward", True), ("forward", False)])
def test_what_backward_computes_again_is_in_the_kernel_that_reads_it(phase, joined):
    """Only there: a result of forward waits in memory."""
    hand = Hand()
    x = hand.input(64, 64)
    gate = hand(aten.mm.default, x, x)
    up = hand(aten.mm.default, gate, x)
    again = hand(aten.silu.default, gate, phase=phase)
    grad = hand(aten.mm.default, up, x, phase=phase)
    product = hand(aten.mul.Tensor, grad, again, phase=phase)
    found = fusion(hand, hand(aten.mm.default, product, x, phase=phase))
    assert (found.kernel(again) is found.kernel(product)) == joined


def test_a_sum_along_columns_reads_what_is_in_memory_again():
    """A bias' gradient does; what only the sum reads is in its kernel, and a sum of rows is in that of its source."""
    hand = Hand()
    x = hand.input(64, 64)
    grad = hand(aten.mm.default, x, x, phase="backward")
    kept = hand(aten.gelu_backward.default, grad, x, phase="backward")
    passing = hand(aten.mul.Tensor, grad, x, phase="backward")
    weight = hand(aten.mm.default, kept, x, phase="backward")
    bias = hand(aten.sum.dim_IntList, kept, [0], phase="backward")
    rows = hand(aten.sum.dim_IntList, kept, [1], phase="backward")
    scale = hand(aten.sum.dim_IntList, passing, [0], phase="backward")
    found = fusion(hand, weight, bias, rows, scale)
    assert found.kernel(bias) is not found.kernel(kept) and found.kernel(rows) is found.kernel(kept)
    assert found.kernel(scale) is found.kernel(passing)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_is_in_the_kernel_of_the_update(fused):
    hand = Hand()
    w, grad, m, v = (hand.input(1024, 1024) for _ in range(4))
    scale, step = hand.input(), hand.input()
    hand(aten.mul_.Tensor, grad, scale, phase="optimizer", val=grad.meta["val"])
    args = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    args |= {"amsgrad": False, "maximize": False}
    hand(aten._fused_adamw_.default, [w], [grad], [m], [v], [], [step], phase="optimizer", val=(), **args)
    graph = hand.step().graph
    aliases = Aliases(graph)
    seconds = sum(Roofline(graph, aliases, Fusion(graph, aliases, fused), GPUS["h100"]).seconds.values())
    passes = 8 if fused else 10  # the update reads and writes four tensors
    assert seconds == pytest.approx(passes * 4 * 1024**2 / (MEMORY_REACHED * 3.35e12), rel=0.3 / passes)

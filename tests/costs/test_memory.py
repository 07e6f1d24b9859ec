"""One walk over lifetimes, read in two ways."""

import operator

import pytest
import torch

from stepgraph.costs.attention import transient_bytes
from stepgraph.costs.memory import at_peak, estimate_memory, lifetimes, memory_over_step
from stepgraph.costs.roofline import Fusion
from stepgraph.graph.aliases import Aliases
from stepgraph.graph.values import Parameter
from tests.costs.graphs import Hand, aten

KB = 4 * 256  # bytes of an input


def chain():
    """x -> exp -> neg -> output, and backward reads exp."""
    hand = Hand()
    x = hand.input(256)
    e = hand(aten.exp.default, x)
    y = hand(aten.view.default, hand(aten.neg.default, e), [16, 16])
    g = hand(aten.mul.Tensor, e, e, phase="backward")
    return hand.step(y, g)


def test_each_result_lives_from_its_operator_to_its_last_reader():
    step = chain()
    walk = lifetimes(step.graph, Aliases(step.graph))
    assert {node.name: (made, [n.name for n in freed]) for node, made, freed in walk} == {
        "exp_default": (True, []),
        "neg_default": (True, []),
        "view_default": (False, []),
        "mul_tensor": (True, ["exp_default"]),
    }
    found = estimate_memory(step.graph)
    assert (found.inputs, found.peak, found.saved) == (KB, 4 * KB, KB)


def test_two_readings_of_one_walk_agree():
    step = chain()
    aliases = Aliases(step.graph)
    moments = memory_over_step(step, aliases, Fusion(step.graph, aliases, fused=False))
    assert [m.phase for m in moments] == ["forward", "backward"]
    assert moments[-1].total == estimate_memory(step.graph).peak
    assert moments[0].bytes["activations"] == moments[0].bytes["temporary"] == moments[0].bytes["inputs"] == KB


def test_what_a_kernel_keeps_to_itself_takes_no_memory():
    hand = Hand()
    x = hand.input(256)
    y = hand(aten.neg.default, hand(aten.exp.default, x))
    step = hand.step(y)
    aliases = Aliases(step.graph)
    peaks = [
        max(m.total for m in memory_over_step(step, aliases, Fusion(step.graph, aliases, fused)))
        for fused in (False, True)
    ]
    assert peaks == [3 * KB, 2 * KB]


def test_what_a_kernel_reads_lies_there_until_it_runs():
    """Tiles of a gradient that are put together in the kernel that reads them, after a product."""
    hand = Hand()
    x, w = hand.input(256), hand.input(256)
    tile = hand(aten.sort.default, x)  # no kernel of a compiler's
    values = hand(operator.getitem, tile, 0)
    joined = hand(aten.cat.default, [values, values])
    product = hand(aten.mm.default, hand(aten.view.default, w, [16, 16]), hand(aten.view.default, w, [16, 16]))
    y = hand(aten.add.Tensor, joined, joined)
    step = hand.step(product, y)
    aliases = Aliases(step.graph)
    walk = list(lifetimes(step.graph, aliases, Fusion(step.graph, aliases, fused=True)))
    assert [node for node, _, freed in walk if values in freed] == [y]
    assert not next(made for node, made, _ in walk if node is joined)


def test_what_a_sum_reads_is_free_after_it():
    """Sums of rows that are added up later, as a bias has them from the parts of a loss."""
    hand = Hand()
    x, w = hand.input(256), hand.input(256)
    logits = hand(operator.getitem, hand(aten.sort.default, x), 0)  # no kernel of a compiler's
    first = hand(aten.sum.default, logits)
    second = hand(operator.getitem, hand(aten.sort.default, w), 0)
    both = hand(aten.add.Tensor, first, hand(aten.sum.default, second))
    step = hand.step(both)
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, fused=True)
    assert fusion.kernel(first) is fusion.kernel(both)
    assert [node for node, _, freed in lifetimes(step.graph, aliases, fusion) if logits in freed] == [first]


def test_the_parts_of_a_list_are_memory_and_the_list_is_not():
    hand = Hand()
    x = hand.input(16, 16)
    both = hand(aten.max.dim, x, 1)
    values = hand(operator.getitem, both, 0)
    step = hand.step(values)
    made = {node.name: made for node, made, _ in lifetimes(step.graph, Aliases(step.graph))}
    assert made == {"max_dim": False, "getitem": True}
    assert estimate_memory(step.graph).peak == KB + 4 * 16


def test_a_written_input_is_no_memory_of_its_own():
    hand = Hand()
    p = hand.input(256, what=Parameter("w"))
    new = hand(aten.mul_.Tensor, p, torch.tensor(2.0), phase="optimizer", val=p.meta["val"])
    assert estimate_memory(hand.step(new).graph).peak == KB


def test_attention_takes_its_results_and_sums_while_it_runs():
    """Backward gives three gradients, adds up that of the queries and a number for each row in fp32, and has gradients
    of keys and values for each of the four heads that share them."""
    hand = Hand()
    q, k = hand.input(2, 8, 64, 32, dtype=torch.bfloat16), hand.input(2, 2, 64, 32, dtype=torch.bfloat16)
    size = {n: n.meta["val"].nbytes for n in (q, k)}
    rest = (None, 0, 0, 64, 64, 0.0, True)
    given = [t.meta["val"] for t in (q, k, k)]
    backward = hand(
        aten._scaled_dot_product_cudnn_attention_backward.default, q, q, k, k, q, q, q, q, *rest,
        phase="backward", val=given,
    )  # fmt: skip
    step = hand.step(*[hand(operator.getitem, backward, i, val=t, phase="backward") for i, t in enumerate(given)])
    inputs, results, sums = size[q] + size[k], size[q] + 2 * size[k], 2 * size[q] + 4 * (2 * 8 * 64) + 4 * 2 * size[k]
    found = estimate_memory(step.graph)
    assert (found.inputs, found.peak) == (inputs, inputs + results + sums)
    aliases = Aliases(step.graph)
    fusion = Fusion(step.graph, aliases, fused=False)
    assert max(m.total for m in memory_over_step(step, aliases, fusion)) == found.peak
    assert at_peak(step, aliases, fusion)[0] is backward


@pytest.mark.parametrize(("deterministic", "measured_mib"), [(False, 128.5), (True, 384.5)])
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_workspace_of_attention_is_what_was_measured(kernel, deterministic, measured_mib):
    """4 x 8/4 heads x 4096 x 128 on an H200: FlashAttention 2 has five gradients of the queries where it must repeat
    every bit; cuDNN is not taken there."""
    hand = Hand()
    q, k = hand.input(4, 8, 4096, 128, dtype=torch.bfloat16), hand.input(4, 4, 4096, 128, dtype=torch.bfloat16)
    target = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    rest = (
        (q, q, None, None, None, 4096, 4096, 0.0, True)
        if kernel == "cudnn"
        else (None, None, 4096, 4096, 0.0, True, q, q)
    )
    backward = hand(target, q, q, k, k, q, q, *rest, phase="backward", val=[t.meta["val"] for t in (q, k, k)])
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = transient_bytes(backward) / 2**20
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == (measured_mib if kernel == "flash" else 128.5)

"""What attention costs by each backend: the measured figures come out again, and nothing is made up."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.costs.attention import Case, seconds
from stepgraph.costs.flops import flops, is_attention
from stepgraph.costs.hardware import ATTENTION_REACHED, GPUS
from stepgraph.costs.roofline import node_seconds
from stepgraph.graph.marks import VISIBLE_PAIRS
from tests.costs.graphs import Hand, aten

H200 = GPUS["h200"]
BF16 = torch.bfloat16
LLAMA_1B = Case(4, 32, 8, 4096, 4096, 64, 64, True, BF16)
LLAMA_8B = Case(1, 32, 8, 8192, 8192, 128, 128, True, BF16)


@pytest.mark.parametrize(
    ("case", "backend", "forward", "both"),
    [
        (LLAMA_1B, "cudnn", 0.65, 2.54),
        (LLAMA_1B, "flash2", 0.98, 4.04),
        (LLAMA_1B, "flex", 0.80, 3.49),
        (LLAMA_8B, "flex", 1.39, 5.48),
        (LLAMA_8B, "fa4", 0.83, 3.43),
        (Case(32, 8, 8, 2048, 2048, 64, 64, True, BF16), "fa4", 0.35, 1.21),
        (Case(4, 16, 16, 4096, 4096, 192, 128, True, BF16), "cudnn", 0.62, 2.80),
        (Case(4, 16, 16, 4096, 4096, 256, 256, True, BF16), "fa4", 0.79, 4.88),
    ],
)
def test_measured_figures(case, backend, forward, both):
    assert 1e3 * seconds(backend, case, H200, backward=False) == pytest.approx(forward)
    assert 1e3 * seconds(backend, case, H200, backward=True) == pytest.approx(both)
    assert seconds(backend, case, GPUS["h100"], backward=True) == seconds(backend, case, H200, backward=True)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"masked": True},
        {"dtype": torch.float16},
        {"width": 96, "value_width": 96},
        {"queries": 2048, "keys": 2048},  # under half of the measured length
        {"heads": 4},  # under a quarter of the measured queries
    ],
)
def test_what_was_not_measured_has_no_cost(change):
    assert seconds("cudnn", LLAMA_8B, H200, backward=True) is not None
    assert seconds("cudnn", replace(LLAMA_8B, **change), H200, backward=True) is None
    assert seconds("cudnn", LLAMA_8B, GPUS["b200"], backward=True) is None
    assert seconds("flash2", replace(LLAMA_8B, width=256, value_width=256), H200, backward=True) is None


@settings(deadline=None)
@given(st.integers(1024, 40_000), st.booleans())
def test_costs_grow_with_the_length_at_rates_between_the_measured(length, backward):
    case = replace(LLAMA_1B, queries=length, keys=length, batch=16)
    cost = seconds("cudnn", case, H200, backward=backward)
    shorter = seconds("cudnn", replace(case, queries=length - 1, keys=length - 1), H200, backward=backward)
    if shorter is not None:  # below the shortest
        assert shorter < cost
    per_pair = cost / (16 * 32 * length**2)
    ends = [
        seconds("cudnn", measured, H200, backward=backward) / (measured.batch * measured.heads * measured.queries**2)
        for measured in (LLAMA_1B, Case(32, 8, 8, 2048, 2048, 64, 64, True, BF16))
    ]
    assert min(ends) * 0.999 <= per_pair <= max(ends) * 1.001


def test_nodes_cost_what_their_backend_does():
    hand = Hand()
    q, dy = (hand.input(4, 32, 4096, 64, dtype=BF16) for _ in "qd")
    k, v = (hand.input(4, 8, 4096, 64, dtype=BF16) for _ in "kv")
    ours = torch.ops.stepgraph
    forward = hand(ours.flash4_attention.default, q, k, v, None, True)
    out, lse = (hand.input(*t.shape, dtype=t.dtype) for t in forward.meta["val"])
    backward = hand(ours.flash4_attention_backward.default, dy, q, k, v, out, lse, None, True, False)
    assert is_attention(forward) and is_attention(backward)
    assert flops(backward) == 2.5 * flops(forward)
    assert 1e3 * node_seconds(forward) == pytest.approx(0.57) and 1e3 * node_seconds(backward) == pytest.approx(1.58)
    given = (q, k, v, None, True, 0.0, True)
    cudnn = hand(aten._scaled_dot_product_cudnn_attention.default, *given, val=(q.meta["val"],) * 2)
    assert 1e3 * node_seconds(cudnn) == pytest.approx(0.65)
    # Nothing like it was measured: the share of attention at large.
    efficient = hand(aten._scaled_dot_product_efficient_attention.default, *given, val=(q.meta["val"],) * 2)
    assert node_seconds(efficient) == pytest.approx(flops(efficient) / 989.5e12 / ATTENTION_REACHED)
    assert node_seconds(cudnn, GPUS["b200"]) == pytest.approx(flops(cudnn) / 2250e12 / ATTENTION_REACHED)


def test_flex_costs_what_its_mask_leaves():
    """What a pass wrote of a known mask has its figures; of a model's own call, whose mask is not known, all counts."""
    hand = Hand()
    q = hand.input(4, 32, 4096, 64, dtype=BF16)
    k, v = (hand.input(4, 8, 4096, 64, dtype=BF16) for _ in "kv")
    made = [hand(torch.ops.higher_order.flex_attention, q, k, v, val=(q.meta["val"],) * 3) for _ in range(3)]
    own, causal, window = made
    pairs = 4096 * 4096
    causal.meta[VISIBLE_PAIRS], window.meta[VISIBLE_PAIRS] = pairs // 2, pairs // 8
    assert flops(own) == 2 * flops(causal) == 8 * flops(window)
    assert 1e3 * node_seconds(causal) == pytest.approx(0.80)
    for node in (own, window):
        assert node_seconds(node) == pytest.approx(flops(node) / 989.5e12 / ATTENTION_REACHED)


@pytest.mark.parametrize(
    ("queries", "batch", "heads", "ms"), [(197, 128, 16, 11.08), (512, 32, 16, 8.72), (1500, 16, 12, 13.5)]
)
def test_attention_of_lengths_that_fill_no_tiles(queries, batch, heads, ms):
    """24 layers of ViT-L and BERT-large and 12 of Whisper's encoder on an H100: as measured, within a tenth."""
    hand = Hand()
    q = hand.input(batch, heads, queries, 64, dtype=BF16)
    val = q.meta["val"]
    forward = hand(aten._scaled_dot_product_cudnn_attention.default, q, q, q, None, True, val=[val])
    rest = (None, 0, 0, queries, queries, 0.0, False)
    operator = aten._scaled_dot_product_cudnn_attention_backward.default
    backward = hand(operator, q, q, q, q, q, q, q, q, *rest, phase="backward", val=[val] * 3)
    layers = 24 if queries < 1500 else 12
    found = 1e3 * layers * (node_seconds(forward, GPUS["h100"]) + node_seconds(backward, GPUS["h100"]))
    assert found == pytest.approx(ms, rel=0.1)

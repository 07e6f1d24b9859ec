"""The tables of hardware, FLOPs and norms, where a figure can be made by hand."""

import pytest
import torch

from stepgraph.costs.flops import flops
from stepgraph.costs.fp8 import product_seconds
from stepgraph.costs.hardware import ASSUMED, GPUS, known_gpu
from stepgraph.costs.norms import Traffic, cost
from stepgraph.costs.roofline import node_seconds
from tests.costs.graphs import Hand, aten


def test_published_figures():
    assert [gpu.peak(torch.bfloat16) for gpu in GPUS.values()] == [989.5e12, 989.5e12, 2250e12]
    assert [gpu.memory for gpu in GPUS.values()] == pytest.approx([80e9, 150.1e9, 180e9])


def test_a_device_is_known_by_its_whole_name():
    assert known_gpu("NVIDIA H200") is GPUS["h200"] is ASSUMED
    assert known_gpu("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert known_gpu("NVIDIA H100 PCIe").name == "H100 PCIe"
    assert known_gpu("NVIDIA H200 NVL") is None and known_gpu("NVIDIA H200 MIG 1g.18gb") is None


def test_attention_counts_its_products():
    hand = Hand()
    q, k = hand.input(2, 8, 128, 64), hand.input(2, 2, 256, 64)
    product = 2 * (2 * 8) * 128 * 256 * 64
    flex = hand(torch.ops.higher_order.flex_attention, q, k, k, val=(q.meta["val"],) * 2)
    assert flops(flex) == 2 * product
    back = hand(torch.ops.higher_order.flex_attention_backward, q, k, k, val=(q.meta["val"],) * 3)
    assert flops(back) == 5 * product
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    k = hand.input(2, 8, 128, 64)
    assert flops(hand(attend, q, k, k, 0.0, True, val=(q.meta["val"],) * 2)) == product // 2  # causal: half
    v = hand.input(2, 8, 128, 32)  # latent attention: values half as wide as keys
    attend = aten._scaled_dot_product_cudnn_attention.default
    assert flops(hand(attend, q, k, v, None, False, 0.0, False, val=(v.meta["val"],) * 2)) == 0.75 * product
    back = aten._scaled_dot_product_cudnn_attention_backward.default
    given = (v, q, k, v, v, v, v, v, None, None, None, 128, 128, 0.0, False)
    assert flops(hand(back, *given, val=(q.meta["val"],) * 3)) == (3 + 2 / 2) / 2 * product


def test_seconds_of_one_node_are_the_longer_of_two():
    hand = Hand()
    a, b = (hand.input(8192, 8192, dtype=torch.bfloat16) for _ in "ab")
    assert node_seconds(hand(aten.mm.default, a, b)) == pytest.approx(2 * 8192**3 / (0.69 * 989.5e12))
    assert node_seconds(hand(aten.add.Tensor, a, b)) == pytest.approx(3 * 2 * 8192**2 / (0.885 * 4.8e12))


def test_products_in_fp8_have_their_own_peak():
    hand = Hand()
    a, b = (hand.input(8192, 8192, dtype=form) for form in (torch.float8_e5m2, torch.float8_e4m3fn))
    scale = hand.input(dtype=torch.float32)
    val = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    product = hand(torch.ops.stepgraph.scaled_product.default, a, b, scale, scale, None, False, val=val)
    assert flops(product) == 2 * 8192**3
    assert (
        node_seconds(product)
        == pytest.approx(2 * 8192**3 / (0.65 * 1979e12))
        == product_seconds((8192, 8192, 8192), fp8=True)
    )
    assert [gpu.peak(torch.float8_e4m3fn) for gpu in GPUS.values()] == [1979e12, 1979e12, 4500e12]


def test_norms_cost_what_they_move():
    size = 2 * 16384 * 4096
    traffic = Traffic(4096, 2 * size, 3 * size, 0, 0)
    # At 4096 the kernel reaches 98% forward, 96% backward, of 4.25 TB/s; two launches.
    assert cost("kernel", traffic) == pytest.approx((2 * size / 0.98 + 3 * size / 0.96) / 4.248e12 + 5e-6)
    assert cost("kernel", traffic) < cost("inductor", traffic) < cost("eager", traffic)
    fused = Traffic(4096, 2 * size, 3 * size, 0, 4 * size)  # the neighbours are worth more than our kernel
    assert cost("inductor", fused) < cost("kernel", fused)


@pytest.mark.parametrize("neighbours", [0, 2])
def test_rows_whose_columns_fit_no_registers_are_our_kernels(neighbours):
    """Squares of 16384: Inductor's backward is at 0.61 of ours, more than a pointwise neighbour is worth."""
    size = 2 * 16384**2
    square = Traffic(16384, 2 * size, 3 * size, 0, neighbours * size)
    assert cost("kernel", square) < cost("inductor", square)
    apart = [cost(choice, Traffic(16384, 0, 3 * size, 0, 0)) for choice in ("kernel", "inductor")]
    assert apart[0] / apart[1] == pytest.approx(0.61, abs=0.01)

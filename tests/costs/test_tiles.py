"""Products by rounds of tiles."""

import pytest

from stepgraph.costs.hardware import GPUS, PRODUCTS_REACHED
from stepgraph.costs.tiles import gram_seconds, product_seconds

H200 = GPUS["h200"]
PEAK = 989.5e12 * PRODUCTS_REACHED


def test_small_products_leave_processors_idle():
    one = product_seconds(H200, 1, 768, 768, 768)
    assert one == product_seconds(H200, 3, 768, 768, 768) == pytest.approx(132 / 36 * 2 * 768**3 / PEAK)
    assert product_seconds(H200, 4, 768, 768, 768) == 2 * one  # 144 tiles for 132 processors
    assert product_seconds(H200, 11, 768, 768, 768) == 3 * one  # 396: none is idle


def test_half_of_a_symmetric_product():
    """136 tiles take two rounds, as long as the 128 large ones of the whole; of two matrices, three instead of four."""
    for count, of_whole in ((1, 1.0), (2, 0.75), (4, 5 / 8)):
        whole, half = product_seconds(H200, count, 2048, 8192, 2048), gram_seconds(H200, count, 2048, 8192, 1.0)
        assert half == pytest.approx(of_whole * whole)
        assert gram_seconds(H200, count, 2048, 8192, 0.5) == pytest.approx(2 * half)

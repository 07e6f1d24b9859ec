"""Seconds of 16-bit matrix products whose results have few tiles for a GPU's processors.

A processor computes one tile at a time, so that products take whole rounds of tiles: one of 768 x 768 keeps 36 of an
H200's 132 processors busy, and a batch of eleven takes little longer.
"""

import torch

from stepgraph.costs.hardware import PRODUCTS_REACHED, Gpu

#: Rows and columns of a small tile; a large one is two of these.
TILE = 128


def product_seconds(gpu: Gpu, batch: int, m: int, k: int, n: int) -> float:
    """Seconds of ``batch`` products (m, k) @ (k, n), in the tiles that fill ``gpu`` best."""
    down, across = -(-m // TILE), -(-n // TILE)
    tiles = (down * across, 1), (-(-down // 2) * across, 2), (down * -(-across // 2), 2)
    return min(_rounds(gpu, batch * count) * size for count, size in tiles) * _tile_seconds(gpu, k)


def gram_seconds(gpu: Gpu, batch: int, m: int, k: int, reached: float) -> float:
    """Seconds of ``batch`` products of an (m, k) matrix and its transpose, without the tiles above the diagonal.
    ``reached``: the share that a tile's kernel reaches of what other products do."""
    tiles = -(-m // TILE)
    return _rounds(gpu, batch * tiles * (tiles + 1) // 2) * _tile_seconds(gpu, k) / reached


def _rounds(gpu: Gpu, tiles: int) -> int:
    return -(-tiles // gpu.processors)


def _tile_seconds(gpu: Gpu, k: int) -> float:
    return 2 * TILE * TILE * k / (gpu.peak(torch.bfloat16) * PRODUCTS_REACHED / gpu.processors)

"""The cost of an fp8 product and of its casts, on the GPU that passes assume."""

import torch

from stepgraph.costs.hardware import ASSUMED, FP8_REACHED, LAUNCH_S


def product_seconds(sizes: tuple[int, int, int], *, fp8: bool) -> float:
    """Seconds of a product of ``sizes`` (M, N, K) in fp8 or bf16, the result in bf16."""
    M, N, K = sizes
    moved = (M * K + N * K) * (1 if fp8 else 2) + 2 * M * N
    if fp8:
        return ASSUMED.kernel_seconds(2 * M * N * K, torch.float8_e4m3fn, moved, reached=FP8_REACHED)
    return ASSUMED.kernel_seconds(2 * M * N * K, torch.bfloat16, moved)


def recast_seconds(elements: int) -> float:
    """Seconds to cast fp8 ``elements`` again by other rows, by a kernel that reads them twice."""
    return ASSUMED.moving_seconds(3 * elements) + LAUNCH_S


def cast_seconds(elements: int, copies: int, *, reads: int) -> float:
    """Seconds to cast bf16 ``elements`` to fp8 in ``copies`` copies, by ``reads`` kernels that each read them once."""
    return ASSUMED.moving_seconds((2 * reads + copies) * elements) + reads * LAUNCH_S

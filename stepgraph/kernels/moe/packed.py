"""Packed rows: (R, C + TAIL) bytes, each row's C values in float8_e4m3fn and then its scale in fp32.

Any kernel or collective moves a row and its scale as one, and products read the values where they are.
"""

import torch

Tensor = torch.Tensor

E4M3 = torch.float8_e4m3fn

#: Bytes of a row after its values: the scale, and what lets every row begin at a line of the L2 cache.
TAIL = 128


def new_packed(like: Tensor, columns: int) -> Tensor:
    """Room for packed rows of ``columns`` values, one for each row of ``like``."""
    return like.new_empty(like.shape[0], columns + TAIL, dtype=torch.uint8)


def pack(q: Tensor, scale: Tensor) -> Tensor:
    """Values (R, C) and scales (R,), packed."""
    tail = q.new_zeros(q.shape[0], TAIL, dtype=torch.uint8)
    tail[:, :4] = scale.view(torch.uint8).view(-1, 4)
    return torch.cat([q.view(torch.uint8), tail], 1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Values (R, C) and scales (R,): views of packed rows, which are contiguous."""
    C = packed.shape[1] - TAIL
    return packed.view(E4M3).narrow(1, 0, C), packed.view(torch.float32).select(1, C // 4)
